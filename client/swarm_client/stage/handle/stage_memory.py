"""How much memory a stage worker may take, computed by the volunteer from the model's shape.

No figure of the manifest is believed: see `swarm_shared.scheduling.placement.memory_need`.
"""

from __future__ import annotations

from swarm_client.machine.memory_limit import private_allowance
from swarm_client.stage.protocol.slot_sizes import slot_sizes
from swarm_shared.base.errors import CapacityError
from swarm_shared.base.memory import MemoryOffer
from swarm_shared.base.text import memory_text
from swarm_shared.base.types import StageIndex
from swarm_shared.run.manifest import Manifest
from swarm_shared.scheduling.placement.memory_need import least_stage_memory
from swarm_shared.scheduling.placement.memory_plan import stage_needs
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes

BACKWARD_SLOTS = 8
"""Most slots for backward passes. A forward's slot is held until its gradient has come back, a
backward's only while its gradient is sent."""

EXACT_TOTAL_BYTES = 8
PLAIN_TOTAL_BYTES = 4
"""Bytes of one element of a flat vector of gradients: a float64 where gradients are counted."""


def slot_count(manifest: Manifest) -> int:
    """Return the number of payload slots of a worker: forwards, then backwards."""
    microbatches = manifest.limits.stage_queue
    return microbatches + min(microbatches, BACKWARD_SLOTS)


def worker_allowance(
    manifest: Manifest, stage: StageIndex, offer: MemoryOffer, threads: int
) -> int:
    """Return the private memory that a worker of the stage may take beyond its runtime, if it
    computes in the host's memory.

    CapacityError when the stage, or its payloads in flight, need more than `offer`.
    """
    claimed, own_minimum = manifest.stages[stage].memory, least_stage_memory(manifest)[stage]
    for needed in (claimed, own_minimum):
        if not offer.holds(needed):
            raise CapacityError(
                f"stage {stage} needs {needed} and this machine offers {offer}; "
                "offer more with --memory-gib, or choose another device"
            )
    host_bytes = offer.device_bytes if offer.host_bytes is None else offer.host_bytes
    slots_bytes = slot_sizes(manifest, stage).slot_bytes * slot_count(manifest)
    if slots_bytes > host_bytes:
        raise CapacityError(
            f"the microbatches that may be in flight at stage {stage} take "
            f"{memory_text(slots_bytes)} and this machine offers {memory_text(host_bytes)}; "
            "offer more with --memory-gib, or ask the organiser for a smaller stage_queue"
        )
    exact = manifest.codecs.average == "exact"
    total_bytes = EXACT_TOTAL_BYTES if exact else PLAIN_TOTAL_BYTES
    sizes = stage_sizes(manifest)[stage]
    flat_bytes = 2 * total_bytes * sizes.parameters
    # The file of frozen parameters is mapped while they are loaded.
    return private_allowance(host_bytes, flat_bytes, threads) + sizes.frozen_bytes


def streamed_bytes(manifest: Manifest, stage: StageIndex, offer: MemoryOffer) -> int:
    """Return the bytes of weights that must lie in host memory for the stage to fit an offer that
    holds it."""
    return offer.streamed_bytes(manifest.stages[stage].memory)


def host_graph_budget(manifest: Manifest, stage: StageIndex, offer: MemoryOffer) -> int:
    """Return the host memory for autograd graphs of a device with memory of its own: what the stage
    leaves of the offer."""
    if offer.host_bytes is None:
        return 0
    memory, streamed = manifest.stages[stage].memory, streamed_bytes(manifest, stage, offer)
    stage_bytes = memory.host_bytes + (streamed + memory.stream_buffer_bytes if streamed else 0)
    return max(0, offer.host_bytes - stage_bytes)


def graph_budget(manifest: Manifest, stage: StageIndex, offer: MemoryOffer) -> int:
    """Return the device memory for autograd graphs: what the parameters leave of an offer that
    holds the stage."""
    needs = stage_needs(manifest, stage)
    return offer.graph_bytes(needs.memory, needs.parameter_memory)
