"""One pipeline stage on one device, computed in a child process.

protocol  messages and sizes shared by the daemon and the child
handle    the daemon's side (trio, no torch)
worker    the child: torch
"""
