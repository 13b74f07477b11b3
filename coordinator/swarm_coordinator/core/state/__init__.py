"""The values that the coordinator's rules change."""
