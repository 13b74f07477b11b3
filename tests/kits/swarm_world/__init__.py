"""A simulated swarm around the coordinator's core, on a virtual clock."""
