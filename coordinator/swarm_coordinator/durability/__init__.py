"""Backup, restore, verification and integrity checks of a run."""
