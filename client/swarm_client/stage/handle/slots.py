"""Slots of shared memory and the results in them: the daemon's side, no torch.

Slots come in two pools, one for RunForward, one for RunBackward. A forward's slot
stays with its caller, which keeps the output there until the gradient has come back, in case it
must be sent again; if backwards waited for the same slots, callers could deadlock. A backward's
slot is returned as soon as its gradient has been sent upstream, which waits for nothing in this
process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import trio

from swarm_shared.base.transcript import Transcript


class SlotPool:
    """Free slots of one pool. Callers wait in order of arrival, and get EndOfChannel once it is
    closed."""

    def __init__(self, slots: Iterable[int]) -> None:
        self._give, self._take = trio.open_memory_channel[int](math.inf)
        for slot in slots:
            self._give.send_nowait(slot)

    async def take(self) -> int:
        """Wait for a free slot."""
        return await self._take.receive()

    def give(self, slot: int) -> None:
        """Return a slot to the pool; after `close` nothing happens."""
        with suppress(trio.ClosedResourceError):
            self._give.send_nowait(slot)

    def close(self) -> None:
        """End the pool: callers that wait get EndOfChannel."""
        self._give.close()


@dataclass(slots=True, eq=False)
class Output:
    """The result of a computation. `payload` is a view of shared memory until `release`.

    For a forward on any stage but the last: the output activation, and `backward` (or `discard`) is
    to follow. For a backward, and a forward on the last stage: the gradient of the input, None on
    stage 0; `added` is True if this call put the microbatch into the accumulator. loss_sum (over
    `tokens`) is set on the last stage only.
    """

    request: int
    payload: memoryview | None
    tokens: int
    seconds: float
    loss_sum: float | None = None
    added: bool = False
    transcript: Transcript | None = None
    """The transcript of the gradient in the accumulator; None for a microbatch that is not in
    it."""
    owed: bool = False
    """Whether `StageWorker.count_weights` has to follow: the gradients of the weights are not
    computed yet."""
    _release: Callable[[], None] | None = field(default=None, repr=False)

    def release(self) -> None:
        """Return the shared memory; the payload must not be used any more."""
        if self.payload is not None:
            self.payload.release()
            self.payload = None
        if self._release is not None:
            self._release()
            self._release = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
