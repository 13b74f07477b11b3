"""The memory and the cores of this machine that this process may use.

A container or a service may have less than the machine: its control groups say how much.
"""
