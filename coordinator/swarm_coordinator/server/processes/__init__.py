"""Processes that the coordinator starts beside itself, and that never end the run."""
