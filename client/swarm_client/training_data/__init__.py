"""The training data that a trainer needs: fetched by range ahead of need, verified, kept within a
budget of disk space (docs/decisions, number 0038)."""
