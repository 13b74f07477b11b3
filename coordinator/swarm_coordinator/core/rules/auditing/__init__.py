"""Audits: which peers are asked, what follows from their answers, and what is cleared."""
