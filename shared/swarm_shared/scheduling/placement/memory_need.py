"""The least memory that a stage can need, from the model's shape alone, and the check of a manifest
that claims less.

The organiser writes the manifest. A volunteer that offers one gibibyte must not take a stage of
three because the manifest calls it small, so it computes a lower bound itself, without
torch: the parameters exactly, and of what autograd keeps only the activations that every
implementation has to keep. `swarm_shared.model.profile`, from which an organiser's figures come,
measures all of them, so that no honest manifest is below the bound; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterator

from swarm_shared.base.errors import CapacityError
from swarm_shared.base.memory import StageMemory
from swarm_shared.run.codec_sizes import DTYPE_BYTES
from swarm_shared.run.graph_sizes import GRAPHS
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.stage_cut import LayerMatrices, parameter_memory
from swarm_shared.scheduling.placement.stage_sizes import FLOAT_BYTES, stage_sizes


def least_stage_memory(manifest: Manifest) -> tuple[StageMemory, ...]:
    """Return what a peer of each stage takes at least, without the runtime's own overhead."""
    tokens, item_bytes = manifest.tokens_per_microbatch, DTYPE_BYTES[manifest.training.dtype]
    staleness, exact = manifest.training.staleness, manifest.codecs.average == "exact"
    layer = item_bytes * tokens * _layer_activations(manifest)
    # The cross entropy keeps a float32 for each word of the vocabulary.
    head = FLOAT_BYTES * tokens * manifest.model.vocabulary_size
    matrices = LayerMatrices.of(manifest.model)
    last = manifest.stage_count - 1
    bounds: list[StageMemory] = []
    for index, (cut, sizes) in enumerate(zip(manifest.stages, stage_sizes(manifest), strict=True)):
        layers = cut.end_layer - cut.first_layer
        end = head if index == last else 0
        activations = StageMemory.bounded(
            device_bytes=min(layers, 1) * layer + end,
            comfortable_bytes=GRAPHS * (layers * layer + end),
            streamable_bytes=matrices.streamable_bytes(layers, staleness),
            stream_buffer_bytes=matrices.buffer_bytes,
        )
        held = parameter_memory(sizes.parameters, staleness, exact, sizes.frozen_parameters)
        bounds.append(held + activations)
    return tuple(bounds)


def check_stage_memory(manifest: Manifest) -> None:
    """Raise CapacityError if the manifest claims less memory for a stage than it can need."""
    for stage, (cut, least) in enumerate(
        zip(manifest.stages, least_stage_memory(manifest), strict=True)
    ):
        if any(claimed < least_bytes for claimed, least_bytes in _figures(cut.memory, least)):
            raise CapacityError(
                f"the manifest claims {cut.memory} for stage {stage}, and a stage of this shape "
                f"needs at least {least}: a volunteer would take more than it offers; leave this "
                "run, or ask the organiser to make it anew with `swarm-coordinator init`"
            )


def _figures(claimed: StageMemory, least: StageMemory) -> Iterator[tuple[int, int]]:
    yield claimed.device_bytes, least.device_bytes
    yield claimed.comfortable_bytes, least.comfortable_bytes
    yield claimed.host_bytes, least.host_bytes
    # Known exactly, and larger is less of the device.
    yield least.streamable_bytes, claimed.streamable_bytes
    if claimed.streamable_bytes:
        yield claimed.stream_buffer_bytes, least.stream_buffer_bytes


def _layer_activations(manifest: Manifest) -> int:
    """Return the values that autograd keeps of one layer for each token: the inputs of its
    matrices, norms, attention and SwiGLU. Where weights are frozen, the inputs of attention and
    SwiGLU, and of the norms and adapters."""
    config = manifest.model
    attention = 2 * (config.query_size + config.key_size)
    if config.has_adapters:
        targets = set(config.adapters.targets)
        ends = (targets & {"q_proj", "k_proj", "v_proj"}, targets & {"gate_proj", "up_proj"})
        residual = 2 + sum(1 for end in ends if end)
        wide = 4 if "down_proj" in targets else 3
        return residual * config.hidden_size + attention + wide * config.intermediate_size
    normalised = attention if config.query_key_norm else 0
    return 6 * config.hidden_size + attention + normalised + 4 * config.intermediate_size
