"""The rules of the core: each module is one concern of `transition`."""
