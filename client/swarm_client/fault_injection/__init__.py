"""Deliberate faults at an exact peer, step and phase, for tests and benchmarks."""
