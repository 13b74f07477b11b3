"""Messages between the daemon and the averaging worker: values only."""
