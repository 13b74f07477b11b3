"""Bytes at the sockets of a real run, and what each of them was for: `make bench-bytes`.

instrument    runs a program of ours and counts, inside it, what it hands to its sockets
accounting    from the counts of all processes to boundaries and kinds; pure
gossip        what p2pd, which is not ours, has sent over its sockets
"""
