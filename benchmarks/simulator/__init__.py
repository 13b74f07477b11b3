"""The simulator: its own cost, its predictions, and rules compared in simulated swarms."""
