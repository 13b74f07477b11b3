"""The run's folder: its files, checkpoints and the index of shards."""
