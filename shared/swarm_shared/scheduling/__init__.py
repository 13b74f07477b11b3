"""Pure functions that decide who computes what: routing, in-flight window, placement."""
