"""The daemon's side of the stage worker (trio, no torch)."""
