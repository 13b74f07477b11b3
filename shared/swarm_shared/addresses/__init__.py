"""Multiaddresses as text: which count, which are dialled in what order, and their binary form.

Apart from `swarm_shared.network`, which imports py-libp2p: that alone takes most of a second.
"""
