"""Admission: tokens, allow-list, bans, certificates, and the owners of devices."""
