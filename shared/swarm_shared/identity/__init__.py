"""Keys, signatures, certificates and invites."""
