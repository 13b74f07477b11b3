"""`swarm-client doctor`: whether this machine can take part, and what to do where it cannot.

Imports nothing: one of its modules runs in a process of its own, which must be quick and small.
"""
