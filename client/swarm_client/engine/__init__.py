"""The volunteer's part of the step protocol: edges, stage server, trainer, rounds (trio only)."""
