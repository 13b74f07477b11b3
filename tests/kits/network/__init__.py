"""libp2p nodes of one process."""
