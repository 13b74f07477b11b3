"""Probes of this machine, one for each kind of reading.

A probe is cheap, never raises for what the machine lacks (None: unknown), and does not depend on
preferences. Probes are called from one thread at a time, not on the event loop.
"""
