"""Pure functions that assign work: routing, in-flight window, placement."""
