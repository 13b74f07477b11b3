"""What attackers are made of: raw sockets, real handshakes with any key, raw frames of the muxer.

Attackers never call into their victim. What they share with it is the cryptography, because a
refusal counts only when the attack is made rightly up to the point that is tested.
"""
