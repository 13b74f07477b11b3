"""Large tensors of a device, read on the host piece by piece.

Each piece is copied into one of two pinned buffers, on a stream of its own, while the host reads
the piece before it. So the copy engine and the host work side by side, where `Tensor.cpu` has them
wait for each other, and pageable memory takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import cycle
from typing import TypeVar

import torch
from torch import Tensor

from swarm_client.stage.worker.accelerator import Accelerator, Event, Streams

PIECE_BYTES = 2**24
"""Long enough that starting a copy takes no share of it worth mentioning. Counts of gradients are
made in windows of this size, so that one leaves the device while the next one is made."""
BUFFERS = 2

T = TypeVar("T")

See = Callable[[Tensor], None]
"""Called with each piece, flat and in host memory, in order; it is valid until the call returns."""


@dataclass(slots=True, eq=False)
class _Buffer:
    bytes: Tensor
    copied: Event


class PiecesToHost:
    """The reader of a device. Not thread-safe."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._down = streams.stream()
        self._buffers = cycle(
            [_Buffer(streams.pinned(PIECE_BYTES), streams.event()) for _ in range(BUFFERS)]
        )
        self._arriving: tuple[_Buffer, Tensor] | None = None

    def now(self) -> Event:
        """Return the moment at which all that was begun so far is computed."""
        moment = self._streams.event()
        moment.record()
        return moment

    def in_background(self, work: Callable[[], T]) -> Future[T]:
        """Start host work in a thread. Only that work may read until it ends."""
        return self._streams.in_background(work)

    def begin(self) -> None:
        """Forget what was not read to its end, because an error came between."""
        self._arriving = None

    def read(self, tensor: Tensor, see: See, computed: Event | None = None) -> None:
        """Begin to copy a tensor, and read all pieces but the last one that was begun.

        `computed`: when the tensor is; by default, when all is that was begun so far.
        """
        flat = tensor.detach().reshape(-1)
        for part in torch.split(flat, PIECE_BYTES // flat.element_size()):
            buffer = next(self._buffers)
            staged = buffer.bytes[: part.nbytes].view(part.dtype)
            if computed is None:
                self._down.wait_stream(self._streams.computing())
            else:
                self._down.wait_event(computed)
            with self._streams.using(self._down):
                staged.copy_(part, non_blocking=True)
                buffer.copied.record()
            self._streams.used_by(part, self._down)
            self.finish(see)
            self._arriving = buffer, staged

    def finish(self, see: See) -> None:
        """Read the piece that was begun last."""
        if self._arriving is None:
            return
        (buffer, staged), self._arriving = self._arriving, None
        buffer.copied.synchronize()
        see(staged)


def pieces_to_host(accelerator: Accelerator) -> PiecesToHost | None:
    """Return the reader of a device with streams; None for others, whose tensors are read whole."""
    return None if accelerator.streams is None else PiecesToHost(accelerator.streams)
