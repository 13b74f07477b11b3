"""The run's database: journal, history, admission rows; SQLite or PostgreSQL."""
