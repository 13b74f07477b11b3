"""Verdicts about audited microbatches, and the evidence from which anyone can recompute them."""
