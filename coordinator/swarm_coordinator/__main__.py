"""`python -m swarm_coordinator`: the same as the command `swarm-coordinator`."""

from swarm_coordinator.cli.main import main

main()
