"""The memory that a stage takes, and the memory that a machine offers.

A machine with an accelerator has two memories, the device's and the host's, and a stage needs some
of each. On a machine without one the device computes in the host's memory, which is offered once
for both.
"""

from __future__ import annotations

from typing import Self

from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.text import memory_text
from swarm_shared.base.types import MAX_EXACT_INTEGER, Count

FORWARD_SHARE = 1 / 3
"""The forward pass's fraction of the work of a microbatch: a backward pass has two products of
matrices for each of the forward's."""


class StageMemory(FrozenModel):
    """Bytes that a peer of a stage takes, without the runtime's own overhead."""

    device_bytes: Count = 0
    """At least: every layer's activations are computed again in the backward pass."""
    comfortable_bytes: Count = 0
    """Of the device, to compute nothing twice; at least `device_bytes`."""
    host_bytes: Count = 0

    def __add__(self, other: StageMemory) -> StageMemory:
        """Return what both stages take at once, at most the largest possible figure."""
        return StageMemory(
            device_bytes=_sum(self.device_bytes, other.device_bytes),
            comfortable_bytes=_sum(self.comfortable_bytes, other.comfortable_bytes),
            host_bytes=_sum(self.host_bytes, other.host_bytes),
        )

    def __str__(self) -> str:
        return (
            f"{memory_text(self.device_bytes)} of device memory and {memory_text(self.host_bytes)} "
            "of the host's"
        )


class MemoryOffer(FrozenModel):
    """Bytes that a machine offers to one stage."""

    device_bytes: Count
    host_bytes: Count | None = None
    """None: the device computes in the host's memory, of which `device_bytes` are offered."""

    def holds(self, stage: StageMemory) -> bool:
        """Whether the stage fits."""
        if self.host_bytes is not None and stage.host_bytes > self.host_bytes:
            return False
        return stage.device_bytes <= self._for_device(stage)

    def speed(self, stage: StageMemory) -> float:
        """Return the expected fraction of full speed at which the stage is computed, if it fits.

        With less memory than is comfortable, part of the forward pass is computed twice. The
        activations that are kept grow in proportion to the memory between both figures.
        """
        more = stage.comfortable_bytes - stage.device_bytes
        if more <= 0:
            return 1.0
        kept = (self._for_device(stage) - stage.device_bytes) / more
        return 1 / (1 + FORWARD_SHARE * (1 - min(max(kept, 0.0), 1.0)))

    def _for_device(self, stage: StageMemory) -> int:
        return self.device_bytes - (stage.host_bytes if self.host_bytes is None else 0)

    def replaced(self, device_bytes: int) -> Self:
        """Return the offer with another amount of the device's memory."""
        return self.model_copy(update={"device_bytes": device_bytes})

    def __str__(self) -> str:
        if self.host_bytes is None:
            return f"{memory_text(self.device_bytes)} of memory"
        return (
            f"{memory_text(self.device_bytes)} of device memory and {memory_text(self.host_bytes)} "
            "of the host's"
        )


def _sum(one: int, other: int) -> int:
    return min(one + other, MAX_EXACT_INTEGER)
