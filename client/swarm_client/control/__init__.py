"""The daemon's local control API: what the command line, the terminal view and scripts speak."""
