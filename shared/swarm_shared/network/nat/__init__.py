"""NAT traversal: identify, dial-back, relays (circuit v2) and hole punching (DCUtR)."""
