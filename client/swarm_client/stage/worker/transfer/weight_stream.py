"""Weights that lie in host memory, and come to the device for one product at a time.

A stage whose weights, sums and gradients do not fit the device keeps some of its layers' matrices
in pinned host memory. Each product copies its matrix into one of two buffers on the device; while
it computes, the matrix of the product after it is copied into the other one, on a stream of its
own. Which product follows is learned from the last microbatch: a stage's products repeat. (Weights
that are copied when they are needed, with a copy ahead, are those of ZeRO-Infinity, Rajbhandari
et al. 2021, arXiv 2104.07857, section 5; it streams whole layers.) The gradient of such a weight
leaves the device as soon as it is known, and comes back in pieces when it is added to the sums,
after all gradients of the microbatch have been found finite. The values are the same, so the
results are the same to the bit.

The optimizer changes the weights where they lie (`swarm_shared.model.optimizer`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_client.stage.worker.accelerator import Accelerator, Event, Streams
from swarm_shared.model import Linear, Stage
from swarm_shared.run.stage_cut import STREAM_BUFFERS

Place = tuple[bool, int, int]
"""A place in the order of products: whether it is in a backward pass, and the `id` of the weights
of the last product and of the one before. The next product depends on these."""


@dataclass(slots=True, eq=False)
class _Buffer:
    """Memory of the device for one weight."""

    elements: Tensor
    copied: Event
    """The end of the last copy into it."""
    used: Event
    """The end of the last product with it."""
    holds: int = 0
    """The `id` of the weight in it; 0 for none."""

    def like(self, weight: Tensor) -> Tensor:
        """Return a view of the buffer with the shape of a weight."""
        return self.elements[: weight.numel()].view(weight.shape)


class WeightStream:
    """Some weights of a stage, all in pinned memory of the host. Not thread-safe."""

    def __init__(self, device: torch.device, streams: Streams, weights: Sequence[Tensor]) -> None:
        self._streams = streams
        self._up, self._down = streams.stream(), streams.stream()
        self._leaving: deque[Event] = deque()
        """The ends of copies of gradients."""
        largest = max(weight.numel() for weight in weights)
        self._buffers = [
            _Buffer(torch.empty(largest, device=device), streams.event(), streams.event())
            for _ in range(STREAM_BUFFERS)
        ]
        # The memory may belong to what the device is still computing.
        self._up.wait_stream(streams.computing())
        self._weights = {id(weight): weight for weight in weights}
        self.late_copies = 0
        """Copies that were begun only when a product needed them."""
        self._place: Place = (False, 0, 0)
        self._follows: dict[Place, int] = {}

    @contextmanager
    def on_device(self, weight: Tensor, *, in_backward: bool) -> Iterator[Tensor]:
        """Provide the weight on the device, for what is handed to the device within."""
        key = id(weight)
        self._follows[self._place] = key
        self._place = (in_backward, key, self._place[1])
        buffer = self._buffer_of(key)
        if buffer is None:
            self.late_copies += 1
            buffer = self._copied(key)
        self._streams.computing().wait_event(buffer.copied)
        try:
            yield buffer.like(weight)
        finally:
            buffer.used.record()
        # The buffer of this product is the one that must not be taken next.
        self._buffers.sort(key=lambda candidate: candidate is buffer)
        following = self._follows.get(self._place, 0)
        if following and self._buffer_of(following) is None:
            self._copied(following)

    def keep_gradient(self, gradient: Tensor) -> Callable[[], Tensor]:
        """Begin to copy a weight's gradient to host memory; return what waits for its end."""
        streams, done = self._streams, self._streams.event()
        host = streams.pinned(gradient.nbytes).view(gradient.dtype).view(gradient.shape)
        self._down.wait_stream(streams.computing())
        with streams.using(self._down):
            host.copy_(gradient, non_blocking=True)
            done.record()
        streams.used_by(gradient, self._down)
        # The host runs ahead of the device, and would make gradients faster than they leave.
        self._leaving.append(done)
        if len(self._leaving) == STREAM_BUFFERS:
            self._leaving.popleft().synchronize()

        def arrived() -> Tensor:
            done.synchronize()
            return host

        return arrived

    @property
    def nbytes(self) -> int:
        """The memory of the device that the stream takes."""
        return sum(buffer.elements.nbytes for buffer in self._buffers)

    @property
    def host_bytes(self) -> int:
        """The memory of the host that the weights take."""
        return sum(weight.nbytes for weight in self._weights.values())

    def forget(self) -> None:
        """Wait for copies that are under way, and copy every weight anew from now on. To be called
        before a weight changes."""
        for buffer in self._buffers:
            buffer.copied.synchronize()
            buffer.holds = 0

    def _buffer_of(self, key: int) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.holds == key), None)

    def _copied(self, key: int) -> _Buffer:
        """Begin to copy a weight into the buffer whose last use is the longest ago."""
        buffer, weight = self._buffers[0], self._weights[key].detach()
        with self._streams.using(self._up):
            self._up.wait_event(buffer.used)
            buffer.like(weight).copy_(weight, non_blocking=True)
            buffer.copied.record()
        buffer.holds = key
        return buffer


def stream_weights(
    stages: Sequence[Stage], wanted_bytes: int, accelerator: Accelerator
) -> WeightStream | None:
    """Move matrices of layers from the device to host memory until so many bytes of the device are
    free, or will be, as their gradients are not there; None if none need to be moved. `stages` are
    copies of one stage.

    ValueError where all matrices together are too few, or the device has no memory of its own.
    """
    if wanted_bytes <= 0:
        return None
    streams = accelerator.streams
    if streams is None:
        raise ValueError(f"{accelerator.device} computes in the host's memory")
    chosen: list[Linear] = []
    moved: dict[int, Tensor] = {}
    for alike in zip(*(stage.matrices() for stage in stages), strict=True):
        if _freed_bytes(moved, len(stages)) >= wanted_bytes:
            break
        chosen += alike
        # Frozen weights are the same in all copies.
        moved |= {id(linear.weight): linear.weight for linear in alike}
    freed = _freed_bytes(moved, len(stages))
    if freed < wanted_bytes:
        raise ValueError(
            f"all matrices of the stage's layers free {freed} bytes of the device, and "
            f"{wanted_bytes} are needed"
        )
    for weight in moved.values():
        pinned = streams.pinned(weight.nbytes).view(weight.dtype).view(weight.shape)
        weight.data = pinned.copy_(weight.detach())
    stream = WeightStream(accelerator.device, streams, list(moved.values()))
    for linear in chosen:
        linear.host_weights = stream
    return stream


def _freed_bytes(weights: dict[int, Tensor], stages: int) -> int:
    """Return the bytes that these weights of so many copies of a stage leave free, as
    `LayerMatrices` counts them."""
    sizes = [weight.nbytes for weight in weights.values()]
    trained = [weight.nbytes for weight in weights.values() if weight.requires_grad]
    buffers = 2 * max(sizes, default=0) + max(trained, default=0)
    return sum(sizes) + sum(trained) // stages - STREAM_BUFFERS * buffers
