"""Values and helpers that depend on nothing else of the project."""
