"""Exception groups: their single errors, and which one of them is reported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from swarm_shared.base.errors import SwarmError


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Iterate over the errors in a group, its nested groups included; a single error is its own."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from leaves(part)
    else:
        yield error


def expected_error(error: BaseException) -> SwarmError | None:
    """Return the first error when all of them are expected; None when any is a bug."""
    first: SwarmError | None = None
    for leaf in leaves(error):
        if not isinstance(leaf, SwarmError):
            return None
        first = first or leaf
    return first


@contextmanager
def single_error_unwrapped() -> Iterator[None]:
    """Raise the exception of a group of one in place of the group.

    A nursery wraps even a single exception of its body; callers expect it as it was raised.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        if len(group.exceptions) != 1:
            raise
        error = group.exceptions[0]
        context = error.__context__
        try:
            raise error
        finally:
            # `raise` sets the group as the error's context; a traceback would show the error twice.
            error.__context__ = context
