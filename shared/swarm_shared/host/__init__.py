"""What this process may use of its machine, memory and cores, and how it is asked to stop.

A container or a service may have less than the machine: its control groups say how much.
"""
