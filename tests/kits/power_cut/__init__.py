"""A file system that drops, when its power is cut, what was not synced. Linux, as root."""
