"""Memory of stages and machines without an accelerator, in one figure."""

from __future__ import annotations

from swarm_shared.base.memory import MemoryOffer, StageMemory, StreamedWork
from swarm_shared.protocol import StageNeeds

WORK = StreamedWork(intensity=1024.0)
"""Products with 2,048 tokens of a microbatch."""


def takes(size_bytes: int) -> StageMemory:
    """The memory of a stage that takes so much of its device, and nothing of the host besides."""
    return StageMemory(device_bytes=size_bytes, comfortable_bytes=size_bytes)


def needs(memory: StageMemory) -> StageNeeds:
    """What a stage of two layers takes, if the least of it is its parameters' memory."""
    return StageNeeds(
        memory=memory,
        parameter_memory=memory,
        parameters=1000,
        layers=2,
        layer_input_bytes=0,
        is_last=False,
        streamed=WORK,
    )


def offers(size_bytes: int) -> MemoryOffer:
    """The offer of a machine that computes in its host's memory."""
    return MemoryOffer(device_bytes=size_bytes)
