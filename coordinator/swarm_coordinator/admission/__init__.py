"""Who may join: tokens, allow-list, bans, certificates and the owners of devices."""
