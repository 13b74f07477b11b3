"""What this process may use of its machine, memory and cores, how it is asked to stop, and how it
starts others.

A container or a service may have less than the machine: its control groups say how much.
"""
