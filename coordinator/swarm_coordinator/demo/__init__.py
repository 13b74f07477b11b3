"""`swarm-coordinator demo`: a whole run on one machine, from processes to summary."""
