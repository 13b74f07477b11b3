"""The daemon's side of the averaging worker: supervisor, directory requests, stream bridge
(trio)."""
