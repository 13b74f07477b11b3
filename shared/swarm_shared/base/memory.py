"""The memory that a stage takes, and the memory that a machine offers.

A machine with an accelerator has two memories, the device's and the host's, and a stage needs some
of each. On a machine without one the device computes in the host's memory, which is offered once
for both.
"""

from __future__ import annotations

from typing import Literal, Self

from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.text import memory_text
from swarm_shared.base.types import MAX_EXACT_INTEGER, Count, FlopsPerByte

FORWARD_SHARE = 1 / 3
"""The forward pass's fraction of the work of a microbatch: a backward pass has two products of
matrices for each of the forward's."""

DEFAULT_BALANCE: FlopsPerByte = 1250.0
"""FLOPs that a device of unknown rates is assumed to compute while it copies one byte: those of a
card that computes 15 TFLOP/s and copies 12 GB/s."""


class MachineBalance(FrozenModel):
    """FLOPs that a device computes while it copies one byte from or to host memory, as measured."""

    float32: FlopsPerByte
    bfloat16: FlopsPerByte


class StreamedWork(FrozenModel):
    """What a device computes with matrices of layers that are copied to it for each pass."""

    intensity: FlopsPerByte
    """FLOPs of a layer's forward pass over the bytes of its matrices."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """In which it computes; matrices are copied in float32."""
    are_frozen: bool = False
    """Whether the matrices have no gradients."""

    def slowdown(self, balance: MachineBalance | None, *, recomputed: bool) -> float:
        """Return how many times as long a microbatch takes as with matrices on the device; at least
        1. `recomputed`: its layers are computed again in the backward pass, in both cases.

        The next matrix is copied beside a product, so that a pass takes as long as its products or
        its copies, whichever take longer. A backward pass has two products for each matrix, beside
        which its gradient leaves on an engine of its own. Nothing is computed while what is added
        is copied to be hashed, wherever weights are; beside that, their gradients come back.
        """
        device = DEFAULT_BALANCE if balance is None else getattr(balance, self.dtype)
        copy = device / self.intensity  # a forward pass's products take 1
        forwards, backward = (2 if recomputed else 1), (1 if self.are_frozen else 2)
        gradients = 0.0 if self.are_frozen else copy
        streamed = forwards * max(1.0, copy) + max(backward, copy) + gradients
        return float(streamed / (forwards + backward + gradients))


class StageMemory(FrozenModel):
    """Bytes that a peer of a stage takes, without the runtime's own overhead."""

    device_bytes: Count = 0
    """At least: every layer's activations are computed again in the backward pass."""
    comfortable_bytes: Count = 0
    """Of the device, to compute nothing twice; at least `device_bytes`."""
    host_bytes: Count = 0
    streamable_bytes: Count = 0
    """Of `device_bytes`, the part that may be taken of the host's memory besides: weights that are
    copied to the device when they are needed, and their gradients."""
    stream_buffer_bytes: Count = 0
    """Of the device for such weights and gradients, which the host's memory must hold, too."""

    @classmethod
    def bounded(cls, **figures: int) -> StageMemory:
        """Return the memory with these figures, each at most the largest that a figure can have: a
        model's shape can give larger ones, and no machine offers as much."""
        return cls(**{name: min(figure, MAX_EXACT_INTEGER) for name, figure in figures.items()})

    def __add__(self, other: StageMemory) -> StageMemory:
        """Return what both stages take at once, at most the largest possible figure."""
        # Without `bounded`: a placement adds thousands.
        return StageMemory(
            device_bytes=min(self.device_bytes + other.device_bytes, MAX_EXACT_INTEGER),
            comfortable_bytes=min(
                self.comfortable_bytes + other.comfortable_bytes, MAX_EXACT_INTEGER
            ),
            host_bytes=min(self.host_bytes + other.host_bytes, MAX_EXACT_INTEGER),
            streamable_bytes=min(self.streamable_bytes + other.streamable_bytes, MAX_EXACT_INTEGER),
            stream_buffer_bytes=min(
                self.stream_buffer_bytes + other.stream_buffer_bytes, MAX_EXACT_INTEGER
            ),
        )

    def __str__(self) -> str:
        return _both(self.device_bytes, self.host_bytes)


class MemoryOffer(FrozenModel):
    """Bytes that a machine offers to one stage."""

    device_bytes: Count
    host_bytes: Count | None = None
    """None: the device computes in the host's memory, of which `device_bytes` are offered."""
    balance: MachineBalance | None = None
    """None: not measured."""

    def holds(self, stage: StageMemory) -> bool:
        """Whether the stage fits."""
        spare = self._spare_bytes(stage)
        if self.host_bytes is None:
            return spare >= 0
        if spare >= 0:
            return stage.host_bytes <= self.host_bytes
        if -spare > stage.streamable_bytes:
            return False
        return stage.host_bytes - spare + stage.stream_buffer_bytes <= self.host_bytes

    def streamed_bytes(self, stage: StageMemory) -> int:
        """Return the bytes of the device that the stage needs beyond the offer. They are taken of
        the host's memory, if the stage fits at all."""
        return max(0, -self._spare_bytes(stage))

    def graph_bytes(self, stage: StageMemory, parameters: StageMemory) -> int:
        """Return the bytes of the device for autograd graphs: what the stage's parameters leave of
        an offer that holds it."""
        taken = parameters.device_bytes - self.streamed_bytes(stage)
        taken += parameters.host_bytes if self.host_bytes is None else 0
        return max(0, self.device_bytes - taken)

    def speed(self, stage: StageMemory, work: StreamedWork) -> float:
        """Return the expected fraction of full speed at which the stage is computed, if it fits.
        `work` is that of its layers.

        With less memory than is comfortable, part of the forward pass is computed twice: the
        activations that are kept grow in proportion to the memory between both figures. With less
        than the least, weights are copied to the device for each pass; more of them than is
        lacking, as their buffers are on the device.
        """
        more = stage.comfortable_bytes - stage.device_bytes
        spare = self._spare_bytes(stage)
        if spare >= 0:
            return 1 / (1 + FORWARD_SHARE * (1 - spare / more)) if spare < more else 1.0
        buffers = stage.stream_buffer_bytes
        streamed = min(1.0, (buffers - spare) / max(1, stage.streamable_bytes + buffers))
        computed = 1 / (1 + FORWARD_SHARE) if more > 0 else 1.0
        slowdown = work.slowdown(self.balance, recomputed=more > 0)
        return computed / (1 + (slowdown - 1) * streamed)

    def _spare_bytes(self, stage: StageMemory) -> int:
        """Return what is offered for the device beyond the least; negative where it is less."""
        of_host = stage.host_bytes if self.host_bytes is None else 0
        return self.device_bytes - of_host - stage.device_bytes

    def replaced(self, device_bytes: int) -> Self:
        """Return the offer with another amount of the device's memory."""
        return self.model_copy(update={"device_bytes": device_bytes})

    def __str__(self) -> str:
        if self.host_bytes is None:
            return f"{memory_text(self.device_bytes)} of memory"
        return _both(self.device_bytes, self.host_bytes)


def _both(device_bytes: int, host_bytes: int) -> str:
    device, host = memory_text(device_bytes), memory_text(host_bytes)
    return f"{device} of device memory and {host} of the host's"
