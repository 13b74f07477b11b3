"""What crosses between the daemon and the averaging worker: values only."""
