"""The volunteer's long-running process: its lock, the run it takes part in, and its status."""
