"""What writes the tables and pictures of README.md and docs/ from the result files."""
