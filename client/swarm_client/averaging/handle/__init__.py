"""The daemon's side of the averaging worker: supervisor and stream bridge (trio)."""
