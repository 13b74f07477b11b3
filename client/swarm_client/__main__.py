"""`python -m swarm_client`: the same as the command `swarm-client`."""

from swarm_client.cli.main import main

main()
