"""Tokens per second of real swarms on this machine, beside torch alone and under faults."""
