"""The status document: how it is made, written and read."""
