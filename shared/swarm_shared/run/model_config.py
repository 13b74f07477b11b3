"""The shape of the model, as data; free of torch so that the coordinator can read it.

The family is Llama (Touvron et al. 2023, arXiv 2302.13971): pre-norm RMSNorm, rotary positions,
SwiGLU, grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from swarm_shared.base.errors import ConfigurationError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import Finite

ComputeDtype = Literal["float32", "bfloat16"]

MAX_LAYERS = 512
"""Largest number of layers of a model."""


class ModelConfig(FrozenModel):
    """Sizes of a decoder-only transformer. All are counts unless the name says otherwise."""

    vocabulary_size: int = Field(ge=2, le=1_000_000)
    hidden_size: int = Field(ge=8, le=65_536)
    intermediate_size: int = Field(ge=8, le=262_144)
    layers: int = Field(ge=1, le=MAX_LAYERS)
    heads: int = Field(ge=1, le=512)
    key_value_heads: int = Field(ge=1, le=512)
    sequence_length: int = Field(ge=2, le=131_072)
    rope_theta: Finite = Field(default=10_000.0, gt=0, le=1e9)
    norm_epsilon: Finite = Field(default=1e-5, gt=0, le=1)
    tie_embeddings: bool = False
    bottleneck_size: int = Field(default=0, ge=0, le=65_536)
    """Width of the activation at a stage boundary; 0 for the whole residual stream."""
    bottlenecks: tuple[Annotated[int, Field(ge=0, le=MAX_LAYERS)], ...] = Field(
        default=(), max_length=MAX_LAYERS
    )
    """Layers before which the model has a bottleneck: where it may be cut."""

    @model_validator(mode="after")
    def _bottlenecks_are_places(self) -> Self:
        if self.bottleneck_size >= self.hidden_size:
            raise ValueError("bottleneck_size must be less than hidden_size, or 0")
        places = list(self.bottlenecks)
        if places != sorted(set(places)) or any(not 0 <= at <= self.layers for at in places):
            raise ValueError("bottlenecks must be layers of the model, each once, in order")
        if places and not self.bottleneck_size:
            raise ValueError("bottlenecks need a bottleneck_size")
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % (2 * self.heads):
            raise ValueError("hidden_size must be a multiple of 2 * heads (rotary pairs)")
        if self.heads % self.key_value_heads:
            raise ValueError("heads must be a multiple of key_value_heads")
        return self

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.heads

    @property
    def boundary_size(self) -> int:
        """Width of the activation at a stage boundary."""
        return self.bottleneck_size if self.bottlenecks else self.hidden_size


class Preset(FrozenModel):
    """A model with training sizes that suit it.

    The sequences of a step are `microbatches_per_step` times `sequences_per_microbatch`; `init`
    divides them anew for the stages that a run has.
    """

    model: ModelConfig
    tokenizer: Literal["bytes", "bpe"]
    microbatches_per_step: int
    sequences_per_microbatch: int
    steps: int
    learning_rate: float
    stages: int


def _llama(
    vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, kv: int, length: int,
    tied: bool = False,
) -> ModelConfig:  # fmt: skip
    return ModelConfig(
        vocabulary_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate,
        layers=layers, heads=heads, key_value_heads=kv, sequence_length=length,
        tie_embeddings=tied,
    )  # fmt: skip


PRESETS: dict[str, Preset] = {
    # Seconds a step on two cores; plain bytes, so that `init` has no tokenizer to train.
    "tiny": Preset(
        model=_llama(256, 128, 352, 4, 4, 2, 128), tokenizer="bytes",
        microbatches_per_step=16, sequences_per_microbatch=8, steps=60, learning_rate=2e-3,
        stages=2,
    ),
    "small": Preset(
        model=_llama(4096, 512, 1376, 8, 8, 4, 256), tokenizer="bpe",
        microbatches_per_step=16, sequences_per_microbatch=4, steps=500, learning_rate=1e-3,
        stages=2,
    ),
    "125m": Preset(
        model=_llama(32_000, 768, 2048, 12, 12, 12, 1024, tied=True), tokenizer="bpe",
        microbatches_per_step=64, sequences_per_microbatch=4, steps=5_000, learning_rate=6e-4,
        stages=3,
    ),
    "1b": Preset(
        model=_llama(32_000, 2048, 5632, 22, 32, 4, 2048), tokenizer="bpe",
        microbatches_per_step=256, sequences_per_microbatch=1, steps=50_000, learning_rate=4e-4,
        stages=8,
    ),
    "7b": Preset(
        model=_llama(32_000, 4096, 11_008, 32, 32, 32, 2048), tokenizer="bpe",
        microbatches_per_step=512, sequences_per_microbatch=1, steps=100_000, learning_rate=3e-4,
        stages=16,
    ),
}  # fmt: skip
"""Presets by name. `1b` has TinyLlama's shape (arXiv 2401.02385), `7b` Llama's (arXiv 2302.13971,
table 2)."""


def preset(name: str) -> Preset:
    """Return the named preset; ConfigurationError lists the names."""
    if name not in PRESETS:
        raise ConfigurationError(f"there is no preset {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
