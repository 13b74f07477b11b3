"""Rules of choosing peers, compared in the simulator's fine level."""
