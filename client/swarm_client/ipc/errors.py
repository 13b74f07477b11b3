"""Errors of child processes."""

from __future__ import annotations

from swarm_shared.base.errors import SwarmError


class WorkerDied(SwarmError):
    """A child process has ended; all its state is lost."""
