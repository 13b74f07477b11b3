"""Reachability and bandwidth probes: the server that answers and the client that asks."""
