"""Out of whatever was raised: the one error that a person should be told of, if it is one."""

from __future__ import annotations

from swarm_shared.base.errors import SwarmError


def expected_error(error: BaseException) -> SwarmError | None:
    """The error itself, or the first of a group of simultaneous ones; None when any is a bug."""
    if isinstance(error, SwarmError):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [expected_error(one) for one in error.exceptions]
        return found[0] if found and all(one is not None for one in found) else None
    return None
