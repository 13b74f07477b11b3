"""How a process that holds millions of objects for days, and answers thousands, stays quick.

**Garbage.** Python's collector looks at new objects three times, and then again and again at all
that are alive, which takes half a second with ten thousand volunteers; nobody gets an answer
meanwhile. Here it looks at each object once, a moment after it was made, when most are gone, and
sets aside what is left (`gc.freeze`): that is freed as ever when the last reference goes, and only
cycles among what was set aside wait until everything is looked through, which is once an hour.

**Threads.** Whoever waits for something outside Python lets another thread run, and waits for its
turn afterwards: five milliseconds, as Python comes, each time, while a thread encodes a large
status.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import trio

LOOK_SECONDS = 0.1
"""Between two looks at new objects: a few thousand are alive then, some milliseconds of work."""

LOOKS_BETWEEN_WHOLE = 36_000
"""An hour."""

TURN_SECONDS = 0.0005
"""Of a thread that computes, when another one wants to."""


@contextmanager
def responsive() -> Iterator[None]:
    """For as long as a service runs that also runs `collect_garbage`. Of the whole process."""
    turn = sys.getswitchinterval()
    sys.setswitchinterval(TURN_SECONDS)
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
        for _ in range(LOOKS_BETWEEN_WHOLE):
            await trio.sleep(LOOK_SECONDS)
            gc.collect(0)
            gc.freeze()
        gc.unfreeze()
        gc.collect()
        gc.freeze()
