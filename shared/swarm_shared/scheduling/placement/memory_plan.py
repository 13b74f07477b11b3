"""How a machine's memory would be used for a stage, as far as that is known before it has computed.

A worker measures its graphs, and decides by the same rules (`swarm_shared.run.graph_sizes`); here
their sizes are those of the profile. Where host memory is left, it may copy layers there instead of
computing them again, which depends on measured times (`swarm_shared.model.layer_seconds`).
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm_shared.base.memory import FORWARD_SHARE, MemoryOffer
from swarm_shared.base.types import StageIndex
from swarm_shared.protocol import StageNeeds
from swarm_shared.run.codec_sizes import DTYPE_BYTES
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.stage_cut import graph_sizes, parameter_memory
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes


def stage_needs(manifest: Manifest, stage: StageIndex) -> StageNeeds:
    """Return what a peer of the stage takes, by the manifest."""
    cut, sizes = manifest.stages[stage], stage_sizes(manifest)[stage]
    exact = manifest.codecs.average == "exact"
    item_bytes = DTYPE_BYTES[manifest.training.dtype]
    return StageNeeds(
        memory=cut.memory,
        parameter_memory=parameter_memory(
            sizes.parameters, manifest.training.staleness, exact, sizes.frozen_parameters
        ),
        parameters=sizes.parameters + sizes.frozen_parameters,
        layers=cut.end_layer - cut.first_layer,
        layer_input_bytes=manifest.tokens_per_microbatch * manifest.model.hidden_size * item_bytes,
        is_last=stage == manifest.stage_count - 1,
        streamed=sizes.streamed,
    )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What is done for lack of memory, and the speed that it leaves."""

    recomputed_layers: float
    """Number of layers that a microbatch's backward pass computes again; an average over the
    microbatches in flight."""
    streamed_bytes: int
    """Bytes of weights that stay in host memory and are copied to the device for each pass."""
    speed: float
    """Share of full speed."""


def memory_plan(offer: MemoryOffer, needs: StageNeeds) -> MemoryPlan:
    """Return the plan for a stage that the offer holds."""
    memory, held = needs.memory, needs.parameter_memory
    sizes = graph_sizes(memory, held, needs.layers, needs.layer_input_bytes, needs.is_last)
    recomputed = sizes.recomputed_layers(offer.graph_bytes(memory, held), needs.is_last)
    streamed_bytes = offer.streamed_bytes(memory)
    speed = offer.speed(memory, needs.streamed)
    if not streamed_bytes:  # by the layers, where the offer alone gives an estimate
        speed = 1 / (1 + FORWARD_SHARE * recomputed / max(1, needs.layers))
    return MemoryPlan(recomputed, streamed_bytes, speed)
