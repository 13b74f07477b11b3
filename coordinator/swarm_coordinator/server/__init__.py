"""The coordinator's service (trio): carries events into the core and its commands out."""
