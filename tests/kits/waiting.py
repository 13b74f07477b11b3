"""Waiting for what nothing tells of."""

from __future__ import annotations

from collections.abc import Callable

import trio


async def until(condition: Callable[[], object], seconds: float = 50.0) -> None:
    """Return once the condition holds; TooSlowError when it does not within so many seconds."""
    with trio.fail_after(seconds):
        while not condition():
            await trio.sleep(0.005)
