"""The daemon's side of the averaging worker: supervisor, requests, stream bridge (trio)."""
