"""Garbage collection and thread switching of a process that serves thousands of clients for days.

Owns the collector's schedule and the interpreter's switch interval. With ten thousand volunteers a
full collection takes half a second, in which no client gets a reply. So each object is examined at
most once, shortly after its creation, when most objects are already freed; the survivors are frozen
(`gc.freeze`). A frozen object is still freed when its last reference goes; only cycles among frozen
objects wait for a full collection, once an hour.

A collection of what ten thousand clients allocate in a tenth of a second takes ten milliseconds and
mostly finds nothing. After such a collection the next ones are skipped, twice as many each time,
and new objects are frozen unexamined. Little garbage is lost that way, or the next collection would
find it and the skipping would end.

A thread that waits for I/O lets other threads run, and waits up to a switch interval, 5 ms by
default, to continue while another thread computes (encodes a large status, for example). The
interval is shorter here. Long work in a thread also pauses between its parts (`status.pacing`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import trio

COLLECT_INTERVAL_SECONDS = 0.1
"""Seconds between two freezes of new objects; a few thousand are alive then."""

MIN_WORTHWHILE_OBJECTS = 10
"""Objects in cycles that a collection must find for the next one not to be skipped. Fewer in a
tenth of a second are at most about 30 MB an hour."""

MAX_SKIPPED_COLLECTIONS = 31
"""Collections skipped in a row: one still happens every three seconds."""

INTERVALS_PER_FULL_COLLECTION = 36_000
"""Intervals between full collections: one hour."""

SWITCH_INTERVAL_SECONDS = 0.0005
"""Seconds that a computing thread keeps the interpreter lock while another thread waits."""


@contextmanager
def low_latency() -> Iterator[None]:
    """Set the whole process for low latency while the service also runs `collect_garbage`."""
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
    """Collect and freeze new objects until cancelled."""
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


def next_gc_backoff(skipped: int, collected: int) -> int:
    """Collections to skip, after `skipped` ones and one that freed `collected` objects."""
    if collected >= MIN_WORTHWHILE_OBJECTS:
        return 0
    return min(MAX_SKIPPED_COLLECTIONS, 2 * skipped + 1)
