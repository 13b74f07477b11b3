"""Resumable, verified transfer of files between peers."""
