"""Deliberate faults at an exact peer, step and point of a step, for tests and benchmarks."""
