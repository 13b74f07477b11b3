"""Audits among honest machines that are unlike: `make bench-trust-honest`."""
