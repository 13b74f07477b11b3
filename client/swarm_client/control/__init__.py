"""The daemon's local control API, used by the command line, the terminal view and scripts."""
