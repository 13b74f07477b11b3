"""Bytes at the sockets of a real run, by purpose: `make bench-bytes`.

instrument    runs a program of the project and counts what it writes to its sockets
accounting    from the counts of all processes to boundaries and kinds; pure
gossip        bytes sent by p2pd, an external program
"""
