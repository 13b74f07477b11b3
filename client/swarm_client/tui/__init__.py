"""`swarm-client top`: a pure client of the daemon.

It draws `swarm_client.control.status_document.Status` and nothing else, and changes nothing except
by requests to the daemon.
"""
