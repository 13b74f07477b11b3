"""Audits: who audits what, what follows from the answers, and what is cleared."""
