"""Long work in small parts: batches, and rests between parts for a thread beside the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from swarm_shared.base.clock import Clock

T = TypeVar("T")

REST_FACTOR = 4.0
"""How long a thread beside the loop rests, over the time that it has computed."""


def batched(those: Iterable[T], most: int) -> Iterator[list[T]]:
    """Lists of so many of them, the last one perhaps shorter."""
    left = iter(those)
    while batch := list(islice(left, most)):
        yield batch


def with_duty_cycle(
    parts: Iterable[T],
    busy_clock: Clock = time.thread_time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[T]:
    """The parts of a long work, in a thread beside the loop: after each but the last a rest. A
    part should take a millisecond or so, or resting between them helps nobody."""
    rested_at = busy_clock()
    for number, part in enumerate(parts):
        if number:
            sleep(REST_FACTOR * (busy_clock() - rested_at))
            rested_at = busy_clock()
        yield part
