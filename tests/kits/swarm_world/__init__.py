"""A simulated swarm on a virtual clock: the core and the volunteer's rules, as they ship."""
