"""`swarm-client doctor`: whether this machine can participate, and what to do where it cannot.

Imports nothing: one of its modules runs in a process of its own, which must start fast and stay
small.
"""
