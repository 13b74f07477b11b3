"""The gate for local steps: what they cost in loss, in one process (docs/local-steps.md)."""
