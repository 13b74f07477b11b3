"""How a process that holds millions of objects for days, and answers thousands, stays quick.

**Garbage.** Python's collector looks at new objects three times, and then again and again at all
that are alive, which takes half a second with ten thousand volunteers; nobody gets an answer
meanwhile. Here it looks at each object at most once, a moment after it was made, when most are
gone, and sets aside what is left (`gc.freeze`): that is freed as ever when the last reference goes,
and only cycles among what was set aside wait until everything is looked through, once an hour.

A look at what ten thousand clients have made in a tenth of a second holds the loop for ten
milliseconds, and mostly nothing is found. After such a look some that follow are left out, twice as
many each time, and what would have been looked at is set aside as it is. What is lost by that is
little, or the looks would find it and come as often as before.

**Threads.** Whoever waits for something outside Python lets another thread run, and waits for its
turn afterwards: five milliseconds, as Python comes, each time, while a thread encodes a large
status. Turns are shorter here; and a thread with much to do rests for most of the time, or a loop
that has half a core for a second is a second's work behind.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import trio

T = TypeVar("T")

COLLECT_INTERVAL_SECONDS = 0.1
"""Between two moments at which new objects are set aside: a few thousand are alive then."""

MIN_WORTHWHILE_OBJECTS = 10
"""Objects in cycles. Fewer in a tenth of a second are some 30 MB an hour at most."""

MAX_SKIPPED_COLLECTIONS = 31
"""Looks in a row, so that there is one every three seconds."""

INTERVALS_PER_FULL_COLLECTION = 36_000
"""An hour."""

SWITCH_INTERVAL_SECONDS = 0.0005
"""Of a thread that computes, when another one wants to."""


@contextmanager
def low_latency() -> Iterator[None]:
    """For as long as a service runs that also runs `collect_garbage`. Of the whole process."""
    turn = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()
        sys.setswitchinterval(turn)


async def collect_garbage() -> None:
    """Until cancelled."""
    while True:
        left_out = due_in = 0
        for _ in range(INTERVALS_PER_FULL_COLLECTION):
            await trio.sleep(COLLECT_INTERVAL_SECONDS)
            if due_in == 0:
                left_out = due_in = next_gc_backoff(left_out, gc.collect(0))
            else:
                due_in -= 1
            gc.freeze()
        gc.unfreeze()
        gc.collect()
        gc.freeze()


def next_gc_backoff(before: int, found: int) -> int:
    """After a look that has found so many objects, where so many were left out before it."""
    if found >= MIN_WORTHWHILE_OBJECTS:
        return 0
    return min(MAX_SKIPPED_COLLECTIONS, 2 * before + 1)
