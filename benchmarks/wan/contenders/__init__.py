"""The contenders of bench-wan: what starts them, and their programs."""
