"""Long work in small parts: batches, and pauses between parts in a thread beside the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from swarm_shared.base.clock import Clock

T = TypeVar("T")

REST_FACTOR = 4.0
"""Pause of a thread beside the event loop, as a multiple of its computing time."""


def batched(those: Iterable[T], most: int) -> Iterator[list[T]]:
    """Yield lists of `most` items, the last one possibly shorter."""
    left = iter(those)
    while batch := list(islice(left, most)):
        yield batch


def with_duty_cycle(
    parts: Iterable[T],
    busy_clock: Clock = time.thread_time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[T]:
    """Yield the parts of a long computation in a thread, with a pause after each but the last. A
    part should take about a millisecond; pauses between longer parts do not help the loop."""
    rested_at = busy_clock()
    for number, part in enumerate(parts):
        if number:
            sleep(REST_FACTOR * (busy_clock() - rested_at))
            rested_at = busy_clock()
        yield part
