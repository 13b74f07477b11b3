"""A run's metrics for experiment trackers and its steps for traces: read from its database, written
to one of them."""
