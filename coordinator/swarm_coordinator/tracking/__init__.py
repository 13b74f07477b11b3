"""A run's metrics for experiment trackers: read from its database, written to one of them."""
