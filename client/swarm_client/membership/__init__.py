"""Who is admitted to the run: the roster and the check of every inbound stream against it."""
