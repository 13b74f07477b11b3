"""Breakdown of each machine's step time in a real run by activity and cause of waiting."""
