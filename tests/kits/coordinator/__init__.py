"""A coordinator for tests: in process, as a program, with PostgreSQL, behind a browser."""
