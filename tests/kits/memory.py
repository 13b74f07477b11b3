"""Memory of stages and machines without an accelerator, in one figure."""

from __future__ import annotations

from swarm_shared.base.memory import MemoryOffer, StageMemory


def takes(size_bytes: int) -> StageMemory:
    """The memory of a stage that takes so much of its device, and nothing of the host besides."""
    return StageMemory(device_bytes=size_bytes, comfortable_bytes=size_bytes)


def offers(size_bytes: int) -> MemoryOffer:
    """The offer of a machine that computes in its host's memory."""
    return MemoryOffer(device_bytes=size_bytes)
