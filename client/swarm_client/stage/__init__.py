"""One pipeline stage on one device, computed in a child process.

protocol  what crosses between daemon and child: messages and sizes
handle    the daemon's side (trio, no torch)
worker    the child: torch
"""
