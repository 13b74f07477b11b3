"""`swarm-client top`: a pure client of the daemon.

It draws `control.documents.Status` and nothing else, and changes nothing but by asking the daemon.
"""
