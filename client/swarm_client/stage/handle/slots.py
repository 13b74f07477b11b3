"""Slots of shared memory and what a caller holds of one: the daemon's side, no torch.

Slots come in two pools, one for RunForward and RunEvaluation, one for RunBackward. A forward's
slot stays
with its caller, who keeps the output there until the gradient is back in case it must be sent
again; if backwards had to wait for the same slots, callers could wait for each other for ever. A
backward's slot is returned as soon as its gradient is sent upstream, which waits for nothing in
this process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import trio

Buffer = bytes | bytearray | memoryview


class SlotPool:
    """Free slots; takers wait in order of arrival, and get WorkerDied once closed."""

    def __init__(self, slots: Iterable[int]) -> None:
        self._give, self._take = trio.open_memory_channel[int](math.inf)
        for slot in slots:
            self._give.send_nowait(slot)

    async def take(self) -> int:
        return await self._take.receive()

    def give(self, slot: int) -> None:
        with suppress(trio.ClosedResourceError):
            self._give.send_nowait(slot)

    def close(self) -> None:
        self._give.close()


@dataclass(slots=True, eq=False)
class Output:
    """The answer to a computation. `payload` is a view of shared memory until `release`.

    Of a forward on any stage but the last: the output activation, and `backward` is to follow
    (or `discard`). Of a backward, and of a forward on the last stage: the gradient of the input,
    None on stage 0; `added` says whether this put the microbatch into the accumulator. loss_sum
    (over `tokens`) comes from the last stage only.
    """

    request: int
    payload: memoryview | None
    tokens: int
    seconds: float
    loss_sum: float | None = None
    added: bool = False
    _release: Callable[[], None] | None = field(default=None, repr=False)

    def release(self) -> None:
        """Give the shared memory back; the payload must not be used any more."""
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
