"""Whole runs of real processes."""
