"""Credit for work done, and the signed ledger that proves it."""
