"""The run's signed description: data, never code.

The organiser's `run.toml` holds what a person edits; the manifest is derived from it once, by
`swarm-coordinator init`, and is what volunteers receive and verify. It holds everything that
decides what the run computes, so that any two machines with the same manifest compute the same
losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.memory import StageMemory
from swarm_shared.base.types import (
    MAX_MICROBATCHES,
    MAX_SHARDS,
    MAX_STAGES,
    Count,
    Finite,
    Mirrors,
    PeerId,
    RunName,
    Sha256,
)
from swarm_shared.run.codec_sizes import ActivationCodec, AverageCodec, GradientCodec, encoded_bytes
from swarm_shared.run.model_config import MAX_LAYERS, ComputeDtype, ModelConfig

MAX_STEPS = 10**12
"""Largest number of steps; a counter, which costs a volunteer nothing."""

MAX_LEARNING_RATE = 1e3
MAX_CLIP_NORM = 1e6
MIN_EPSILON = 1e-12
"""Bounds that no useful run meets: with them a step changes a parameter by at most 1e21, and so
many steps as a run may have keep it finite in float32. Then no peer can fail to apply a step that
is decided; a model that diverges does so where its next microbatch is computed."""


TokenizerKind = Literal["bytes", "bpe", "file"]
"""Plain bytes, or a tokenizer.json in the run folder: byte pairs learned from the training text, or
the organiser's own file."""


class StageRange(FrozenModel):
    """Transformer layers [first_layer, end_layer) held by one stage.

    Stage 0 also holds the token embedding; the last stage the final norm and the head.
    """

    first_layer: int = Field(ge=0, le=MAX_LAYERS)
    end_layer: int = Field(ge=0, le=MAX_LAYERS)
    work_flops: Finite = Field(default=0.0, ge=0, le=1e24)
    """FLOPs of forward and backward of one microbatch, from the planner's profile."""
    memory: StageMemory = StageMemory()
    """Parameters, optimizer state, gradients and activations in flight, from the same profile."""


class ShardInfo(FrozenModel):
    """One file of tokens: little-endian unsigned integers, `token_bytes` each, nothing else."""

    name: str = Field(pattern=r"^[a-z0-9_-]{1,64}\.tokens$")
    split: Literal["train", "heldout"]
    tokens: int = Field(ge=1, le=2**40)
    merkle_root: Sha256
    """Root of the tree over its leaves, by which each range is verified
    (`swarm_shared.data.merkle`)."""


class DataConfig(FrozenModel):
    token_bytes: Literal[1, 2, 4]
    shards: tuple[ShardInfo, ...] = Field(min_length=2, max_length=MAX_SHARDS)
    mirrors: Mirrors = ()
    """Web folders with copies of the shards. No part of the run's id: they may change."""
    tokenizer: TokenizerKind
    tokenizer_sha256: Sha256 | None = None
    unigram_entropy_nats: Finite = Field(ge=0, le=100)
    """Entropy of the held-out split's own token distribution, a bound for every unigram model."""

    def split(self, name: Literal["train", "heldout"]) -> tuple[ShardInfo, ...]:
        return tuple(shard for shard in self.shards if shard.split == name)


class TrainingSection(FrozenModel):
    """What the organiser sets in [training]."""

    steps: int = Field(ge=1, le=MAX_STEPS, description="Optimizer steps of the whole run.")
    microbatches_per_step: int = Field(
        ge=1,
        le=MAX_MICROBATCHES,
        description="Microbatches averaged into one step; the unit of work that volunteers share.",
    )
    sequences_per_microbatch: int = Field(
        ge=1,
        le=65_536,
        description="Small microbatches keep more volunteers busy, large ones cost less overhead: "
        "`init` chooses both numbers and the queues in [limits] unless one of the two is given.",
    )
    dtype: ComputeDtype = Field(
        default="float32",
        description='"float32", or "bfloat16" for computing in half the memory.',
    )
    evaluation_microbatches: int = Field(
        default=8,
        ge=0,
        le=MAX_MICROBATCHES,
        description="Held-out microbatches measured after the last step.",
    )
    """They are never trained on."""
    staleness: Literal[0, 1] = Field(
        default=0,
        description="1: gradients are one version late, and the pipeline never runs empty between "
        "steps.",
    )
    """Steps by which the parameters of a gradient lag behind. With 1, step t is computed with
    version t - 2, so that its work overlaps with the close of step t - 1."""


class TrainingConfig(TrainingSection):
    seed: Count

    @property
    def heldout_microbatches(self) -> range:
        """The numbers of the held-out microbatches, which follow those of a step: a receipt of one
        can be mistaken for no other."""
        first = self.microbatches_per_step
        return range(first, first + self.evaluation_microbatches)

    @model_validator(mode="after")
    def _microbatches_have_numbers(self) -> Self:
        if self.heldout_microbatches.stop > MAX_MICROBATCHES:
            raise ValueError(
                f"microbatches_per_step and evaluation_microbatches are at most {MAX_MICROBATCHES} "
                "together"
            )
        return self


class OptimizerConfig(FrozenModel):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101), linear warm-up, cosine decay, global clip."""

    learning_rate: Finite = Field(
        gt=0, le=MAX_LEARNING_RATE, description="Peak rate, after the warm-up."
    )
    minimum_learning_rate_ratio: Finite = Field(
        default=0.1,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="The last step's rate over the peak rate.",
    )
    warmup_steps: int = Field(
        ge=0, le=MAX_STEPS, description="Steps over which the rate rises from zero."
    )
    beta1: Finite = Field(default=0.9, ge=0, lt=1)
    beta2: Finite = Field(default=0.95, ge=0, lt=1)
    epsilon: Finite = Field(default=1e-6, ge=MIN_EPSILON, le=1)
    """Larger than torch's 1e-8: with that, elements whose gradients are near rounding noise take
    full steps in random directions, and equal runs drift apart (docs/decisions, number 0002)."""
    weight_decay: Finite = Field(
        default=0.1,
        ge=0,
        le=1 / MIN_EPSILON,
        description="Of matrices only; norms and other vectors are exempt. Times the learning "
        "rate at most 1.",
    )
    clip_norm: Finite = Field(
        default=1.0,
        gt=0,
        le=MAX_CLIP_NORM,
        description="Bound on the gradient norm of the whole model.",
    )

    @model_validator(mode="after")
    def _decay_keeps_the_sign(self) -> OptimizerConfig:
        """A step takes the rate times the decay of a weight away: more than all of it grows."""
        if self.learning_rate * self.weight_decay > 1:
            raise ValueError(
                f"learning_rate {self.learning_rate:g} times weight_decay {self.weight_decay:g} is "
                "more than 1: the decay of one step would be more than the weight itself; lower "
                "one of them"
            )
        return self


class CodecsConfig(FrozenModel):
    """How tensors are encoded at every stage boundary, the same for all peers.

    Part of what the run computes: a receiver continues with what it decoded, so a peer that
    recomputes something must have decoded the same (docs/decisions, number 0021).
    """

    activation: ActivationCodec = "none"
    gradient: GradientCodec = "none"
    average: AverageCodec = "none"
    """Codec of the all-reduce in a stage. `exact` counts gradients instead of summing them, and the
    run equals its reference to the bit (number 0026). What a lossy codec loses depends on the
    number of members, so that replicas stay equal to the bit and the run is only near its reference
    (number 0023)."""


class LimitsConfig(FrozenModel):
    """Bounds that every peer enforces, so that no remote decides how much memory is taken.

    They have bounds themselves: the organiser does not decide how often a volunteer's machine wakes
    up, nor for how many days it waits.
    """

    heartbeat_seconds: Finite = Field(
        default=1.0, ge=0.05, le=60, description="Seconds between two heartbeats of a peer."
    )
    dead_after_seconds: Finite = Field(
        default=4.5,
        ge=0.1,
        le=3600,
        description="Seconds without a heartbeat after which a peer counts as dead.",
    )
    receipt_interval_seconds: Finite = Field(
        default=0.5, ge=0.01, le=60, description="Longest time before finished work is reported."
    )
    edge_credits: int = Field(
        default=32,
        ge=1,
        le=1024,
        description="Microbatches that one sender may have outstanding at one receiver.",
    )
    stage_queue: int = Field(
        default=32,
        ge=1,
        le=4096,
        description="Microbatches that one peer holds at once, over all senders.",
    )
    join_hold_seconds: Finite = Field(
        default=30.0,
        ge=0,
        le=3600,
        description="Longest time that a step close waits for a joining peer that is downloading "
        "its stage.",
    )
    round_stall_seconds: Finite = Field(
        default=10.0,
        ge=0.1,
        le=3600,
        description="Seconds without progress after which an all-reduce has failed.",
    )
    lease_seconds: Finite = Field(
        default=120.0,
        ge=0.1,
        le=86_400,
        description="Seconds after which an unfinished microbatch is leased again to another "
        "trainer.",
    )
    starting_peers_per_stage: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="Peers of every stage for which the first step waits; after a restart of the "
        "coordinator the next step waits for them as well, for ten seconds at most.",
    )


def initial_item(stage: int) -> str:
    """Return the name under which a volunteer fetches a stage's initial state."""
    return f"initial/{stage}"


def with_bottlenecks(model: ModelConfig, stages: Sequence[StageRange]) -> ModelConfig:
    """Return the model with a bottleneck at each boundary between these stages, where it has a
    size."""
    borders = tuple(stage.first_layer for stage in stages[1:]) if model.bottleneck_size else ()
    return model.model_copy(update={"bottlenecks": borders})


class InitialState(FrozenModel):
    """The file of a stage's parameters at version 0, where a run continues from a given model."""

    bytes: int = Field(ge=1, le=2**50)
    sha256: Sha256


class Manifest(FrozenModel):
    format: Literal[1] = 1
    name: RunName
    organiser: PeerId
    """Peer ID of the organiser's key, which signs the manifest and is the coordinator's as well."""
    model: ModelConfig
    stages: tuple[StageRange, ...] = Field(min_length=1, max_length=MAX_STAGES)
    data: DataConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    limits: LimitsConfig = LimitsConfig()
    codecs: CodecsConfig = CodecsConfig()
    checkpoint_steps: int = Field(default=50, ge=1, le=MAX_STEPS)
    initial: tuple[InitialState, ...] = Field(default=(), max_length=MAX_STAGES)
    """The states of version 0, one a stage; empty where the parameters are drawn from the seed."""
    base_model: str = Field(default="", pattern=r"^([\w.-]{1,96}/[\w.-]{1,96})?$")
    """Where the organiser has the initial states from, as a name on the Hugging Face hub; empty if
    it is not from there. The states' hashes decide, this name is for readers."""

    @model_validator(mode="after")
    def _every_stage_or_none_begins_with_a_file(self) -> Self:
        if len(self.initial) not in (0, len(self.stages)):
            raise ValueError("initial must have one file for each stage, or none")
        return self

    @model_validator(mode="after")
    def _stages_cover_the_layers(self) -> Self:
        position = 0
        for stage in self.stages:
            if stage.first_layer != position or stage.end_layer < stage.first_layer:
                raise ValueError("stages must cover the layers in order without gaps")
            position = stage.end_layer
        if position != self.model.layers:
            raise ValueError("stages must cover every layer")
        return self

    @model_validator(mode="after")
    def _every_stage_trains(self) -> Self:
        if self.model.has_adapters and any(
            stage.first_layer == stage.end_layer for stage in self.stages
        ):
            raise ValueError("with adapters every stage needs a layer, as nothing else is trained")
        return self

    @model_validator(mode="after")
    def _borders_are_narrow_or_none_is(self) -> Self:
        borders = tuple(stage.first_layer for stage in self.stages[1:])
        if self.model.bottlenecks and self.model.bottlenecks != borders:
            raise ValueError("a model with bottlenecks has one at each border, and no other")
        return self

    @property
    def stage_count(self) -> int:
        return len(self.stages)

    def work_share(self, stage: int) -> float:
        """Return the stage's share of the whole model's computation, 0 to 1."""
        whole = sum(one.work_flops for one in self.stages)
        return self.stages[stage].work_flops / whole if whole > 0 else 1.0 / self.stage_count

    @property
    def tokens_per_microbatch(self) -> int:
        return self.training.sequences_per_microbatch * self.model.sequence_length

    @property
    def activation_bytes(self) -> int:
        """Bytes on the wire of one microbatch's activation at one boundary."""
        return self._boundary_bytes(self.codecs.activation)

    @property
    def gradient_bytes(self) -> int:
        """Bytes on the wire of one microbatch's gradient at one boundary."""
        return self._boundary_bytes(self.codecs.gradient)

    def _boundary_bytes(self, codec: GradientCodec) -> int:
        elements = self.tokens_per_microbatch * self.model.boundary_size
        return encoded_bytes(codec, elements, self.training.dtype)

    @property
    def tokens_per_step(self) -> int:
        return self.training.microbatches_per_step * self.tokens_per_microbatch
