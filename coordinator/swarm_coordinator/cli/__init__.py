"""`swarm-coordinator`: its commands, one module for each group of them."""
