"""Audits: microbatches of other peers, computed again on the coordinator's order (docs/decisions,
number 0036)."""
