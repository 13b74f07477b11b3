"""Settings files: written as commented TOML, and their errors as sentences."""
