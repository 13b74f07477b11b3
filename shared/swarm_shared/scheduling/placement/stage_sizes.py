"""The size of a stage from the model's shape alone: nothing is built, no torch is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm_shared.base.memory import StreamedWork
from swarm_shared.run.codec_sizes import encoded_bytes
from swarm_shared.run.manifest import CodecsConfig, Manifest, StageRange, TrainingSection
from swarm_shared.run.model_config import AdapterTarget, ModelConfig
from swarm_shared.run.stage_cut import WEIGHT_BYTES, LayerMatrices

FLOAT_BYTES = 4
TOKEN_BYTES = 4
STATE_BYTES_PER_PARAMETER = 3 * FLOAT_BYTES
"""Bytes of the weight and AdamW's two moments; a snapshot holds nothing else per weight, except the
weight of the version before where gradients lag a step behind."""

MAX_STATE_HEADER_BYTES = 1 << 20
"""Bytes of a state file beyond its tensors at most: names, shapes and offsets of its tensors."""


@dataclass(frozen=True, slots=True)
class StageSizes:
    """The parameters of a stage, and the bytes of a microbatch in it."""

    parameters: int
    input_bytes: int
    """Bytes a microbatch brings in: token ids, or the activation of the stage before."""
    output_bytes: int
    """Bytes of the activation sent on; 0 at the last stage."""
    input_gradient_bytes: int
    """Bytes of the gradient sent back; 0 at the first stage, whose input has no gradient."""
    output_gradient_bytes: int
    """Bytes of the gradient received for the output; 0 at the last stage."""
    streamed: StreamedWork
    """The work of a device that copies the layers' matrices for each pass."""
    frozen_parameters: int = 0
    """Parameters that are not trained, which are no part of a state; `parameters` does not count
    them."""
    staleness: int = 0
    """The run's staleness; as many older versions of the parameters are part of the state."""

    @property
    def sent_bytes(self) -> int:
        """Bytes sent for a microbatch: its activation to the next stage, and a gradient to the one
        before."""
        return self.output_bytes + self.input_gradient_bytes

    @property
    def received_bytes(self) -> int:
        return self.input_bytes + self.output_gradient_bytes

    @property
    def state_bytes(self) -> int:
        return (STATE_BYTES_PER_PARAMETER + FLOAT_BYTES * self.staleness) * self.parameters

    @property
    def parameter_bytes(self) -> int:
        return FLOAT_BYTES * self.parameters

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the frozen parameters, which a peer downloads before any state."""
        return FLOAT_BYTES * self.frozen_parameters

    @property
    def gradient_bytes(self) -> int:
        """Bytes that the stage's peers average at the end of a step."""
        return FLOAT_BYTES * self.parameters


def is_size_of_state_file(file_bytes: int, state_bytes: int) -> bool:
    """Whether a file of this size can hold a state of `state_bytes`; nothing larger is fetched."""
    return 0 <= file_bytes - state_bytes <= MAX_STATE_HEADER_BYTES


def layer_parameters(config: ModelConfig) -> int:
    """Return the parameters of one transformer layer: attention, feed-forward and norms."""
    attention = 2 * config.hidden_size * (config.query_size + config.key_size)
    if config.attention_bias != "none":
        attention += config.query_size + 2 * config.key_size
    if config.attention_bias == "all":
        attention += config.hidden_size
    if config.query_key_norm:
        attention += 2 * config.head_size
    return attention + 3 * config.hidden_size * config.intermediate_size + 2 * config.hidden_size


def adapter_parameters(config: ModelConfig) -> int:
    """Return the parameters of one layer's adapters."""
    hidden, wide = config.hidden_size, config.intermediate_size
    inputs_and_outputs: dict[AdapterTarget, int] = {
        "q_proj": hidden + config.query_size,
        "k_proj": hidden + config.key_size,
        "v_proj": hidden + config.key_size,
        "o_proj": config.query_size + hidden,
        "gate_proj": hidden + wide,
        "up_proj": hidden + wide,
        "down_proj": wide + hidden,
    }
    adapters = config.adapters
    return adapters.rank * sum(inputs_and_outputs[target] for target in adapters.targets)


def bottleneck_parameters(config: ModelConfig) -> tuple[int, int]:
    """Return the parameters of one bottleneck: the down-projection with its norm, and the
    up-projection."""
    if not config.bottlenecks:
        return 0, 0
    matrix = config.hidden_size * config.bottleneck_size
    return config.hidden_size + matrix, matrix


def streamed_work(config: ModelConfig, training: TrainingSection) -> StreamedWork:
    """Return what a device computes that copies the layers' matrices for each pass: products with
    the matrices and attention, per byte of copied weights."""
    matrices = LayerMatrices.of(config)
    attention = 4 * config.sequence_length * config.query_size
    tokens = training.sequences_per_microbatch * config.sequence_length
    return StreamedWork(
        intensity=tokens * (2 * matrices.total + attention) / (WEIGHT_BYTES * matrices.total),
        dtype=training.dtype,
        are_frozen=matrices.are_frozen,
    )


def stage_sizes(manifest: Manifest) -> tuple[StageSizes, ...]:
    """Return the sizes of every stage of a run."""
    return sizes_of_cut(manifest.model, manifest.stages, manifest.training, manifest.codecs)


def sizes_of_cut(
    config: ModelConfig,
    stages: Sequence[StageRange],
    training: TrainingSection,
    codecs: CodecsConfig,
) -> tuple[StageSizes, ...]:
    """Return the sizes of every stage of a run that has no manifest yet; `config` has the
    bottlenecks of these stages."""
    tokens = training.sequences_per_microbatch * config.sequence_length
    activation, gradient = (
        encoded_bytes(codec, tokens * config.boundary_size, training.dtype)
        for codec in (codecs.activation, codecs.gradient)
    )
    table = config.vocabulary_size * config.hidden_size
    last = len(stages) - 1
    narrow, widen = bottleneck_parameters(config)
    streamed = streamed_work(config, training)
    sizes: list[StageSizes] = []
    for index, cut in enumerate(stages):
        layers = cut.end_layer - cut.first_layer
        parameters, adapters = (
            layers * layer_parameters(config),
            layers * adapter_parameters(config),
        )
        parameters += (narrow if index < last else 0) + (widen if index else 0)
        if index == 0:
            parameters += table
        if index == last:
            # Both ends of a tied model hold the table, unless they are the same stage.
            shared = config.tie_embeddings and index == 0
            parameters += config.hidden_size + (0 if shared else table)
        sizes.append(
            StageSizes(
                parameters=adapters if config.has_adapters else parameters,
                frozen_parameters=parameters if config.has_adapters else 0,
                input_bytes=activation if index else tokens * TOKEN_BYTES,
                output_bytes=activation if index < last else 0,
                input_gradient_bytes=gradient if index else 0,
                output_gradient_bytes=gradient if index < last else 0,
                streamed=streamed,
                staleness=training.staleness,
            )
        )
    return tuple(sizes)
