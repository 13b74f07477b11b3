"""The shape of the model, as data; free of torch so that the coordinator can read it.

The family is Llama (Touvron et al. 2023, arXiv 2302.13971): pre-norm RMSNorm, rotary positions,
SwiGLU, grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245). Mistral, Qwen2 and Qwen3
have the same blocks; fields say what differs (biases, norms of queries and keys, head size).
Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) are part of the shape: with them the
other parameters are frozen.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from swarm_shared.base.errors import ConfigurationError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import Finite

ComputeDtype = Literal["float32", "bfloat16"]
AttentionBias = Literal["none", "qkv", "all"]
"""Which projections of attention have a bias: none (Llama), those of queries, keys and values
(Qwen2), or the output's as well (Llama and Qwen3 with `attention_bias`)."""

MAX_LAYERS = 512
"""Largest number of layers of a model."""


class RopeScaling(FrozenModel):
    """How the rotary frequencies were changed so that a trained model takes longer sequences.

    `linear` divides them by `factor` (Chen et al. 2023, arXiv 2306.15595). `llama3` divides those
    alone whose wavelength is more than `original_length / low_frequency_factor` tokens, keeps those
    below `original_length / high_frequency_factor`, and interpolates between (as the code that was
    published with Llama 3.1). `yarn` does so by the turns that a pair of coordinates makes in
    `original_length` tokens: it divides at `low_frequency_factor` turns and below, keeps at
    `high_frequency_factor` and above, and multiplies cosine and sine by `attention_factor` (Peng et
    al. 2023, arXiv 2309.00071, sections 3.2 to 3.4).
    """

    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: Finite = Field(default=1.0, ge=1, le=1e6)
    low_frequency_factor: Finite = Field(default=1.0, gt=0, le=1e6)
    high_frequency_factor: Finite = Field(default=4.0, gt=0, le=1e6)
    original_length: int = Field(default=8192, ge=1, le=10_000_000)
    """Tokens of a sequence before the change."""
    attention_factor: Finite = Field(default=1.0, gt=0, le=1e3)

    @model_validator(mode="after")
    def _low_below_high(self) -> Self:
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError(
                "rope_scaling: low_frequency_factor must be less than high_frequency_factor"
            )
        return self


AdapterTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The matrices of a layer, by the names that Hugging Face gives them."""

ALL_TARGETS: tuple[AdapterTarget, ...] = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip
"""Adapters of all matrices learn more than more rank at a few of them (Dettmers et al. 2023, arXiv
2305.14314, section 4)."""


class AdapterConfig(FrozenModel):
    """Low-rank adapters: a matrix W computes x W^T + (alpha / rank) (x A^T) B^T, and only A and B
    are trained."""

    rank: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="Rows of an adapter's first matrix; 0 to train the whole model.",
    )
    alpha: Finite = Field(
        default=32.0,
        gt=0,
        le=1e6,
        description="An adapter's output is multiplied by alpha / rank.",
    )
    targets: tuple[AdapterTarget, ...] = Field(
        default=ALL_TARGETS,
        min_length=1,
        max_length=len(ALL_TARGETS),
        description="Matrices of each layer that have an adapter.",
    )

    @model_validator(mode="after")
    def _targets_differ(self) -> Self:
        if len(set(self.targets)) != len(self.targets):
            raise ValueError("targets must name each matrix once")
        return self

    @property
    def scale(self) -> float:
        """The factor of an adapter's output; only where there are adapters."""
        return self.alpha / self.rank


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
    attention_head_size: int = Field(default=0, ge=0, le=4096, multiple_of=2)
    """Width of a head; 0 for `hidden_size / heads`."""
    attention_bias: AttentionBias = "none"
    query_key_norm: bool = False
    """Whether the queries and keys of each head are normalised before their rotation (Qwen3)."""
    rope_scaling: RopeScaling = RopeScaling()
    bottleneck_size: int = Field(default=0, ge=0, le=65_536)
    """Width of the activation at a stage boundary; 0 for the whole residual stream."""
    bottlenecks: tuple[Annotated[int, Field(ge=0, le=MAX_LAYERS)], ...] = Field(
        default=(), max_length=MAX_LAYERS
    )
    """Layers before which the model has a bottleneck: where it may be cut."""
    adapters: AdapterConfig = AdapterConfig()

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
    def _frequencies_fall(self) -> Self:
        if self.rope_scaling.kind == "yarn" and self.rope_theta <= 1:
            raise ValueError("rope_theta must be more than 1 where rope_scaling is yarn")
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if not self.attention_head_size and self.hidden_size % (2 * self.heads):
            raise ValueError("hidden_size must be a multiple of 2 * heads (rotary pairs)")
        if self.hidden_size % self.heads:
            raise ValueError("hidden_size must be a multiple of heads")
        if self.heads % self.key_value_heads:
            raise ValueError("heads must be a multiple of key_value_heads")
        return self

    @model_validator(mode="after")
    def _is_of_a_family(self) -> Self:
        """Refuse what no class of Hugging Face's transformers computes: an export needs one."""
        if self.query_key_norm and self.attention_bias == "qkv":
            raise ValueError(
                'query_key_norm (Qwen3) goes with attention_bias "none" or "all", not with "qkv" '
                "(Qwen2)"
            )
        return self

    @model_validator(mode="after")
    def _adapters_fit(self) -> Self:
        if self.adapters.rank > self.hidden_size:
            raise ValueError("the rank of adapters must be at most hidden_size")
        if self.adapters.rank and self.bottleneck_size:
            raise ValueError("adapters need a trained model, and one with bottlenecks cannot be it")
        return self

    @property
    def has_adapters(self) -> bool:
        """Whether adapters alone are trained, and every other parameter is frozen."""
        return self.adapters.rank > 0

    @property
    def base(self) -> ModelConfig:
        """The same model without adapters."""
        return self.model_copy(update={"adapters": AdapterConfig()})

    @property
    def trains_tied_table(self) -> bool:
        """Whether gradients of one token table come from both ends of the model."""
        return self.tie_embeddings and not self.has_adapters

    @property
    def head_size(self) -> int:
        return self.attention_head_size or self.hidden_size // self.heads

    @property
    def query_size(self) -> int:
        """Width of the queries of all heads, which is that of attention's output."""
        return self.heads * self.head_size

    @property
    def key_size(self) -> int:
        """Width of the keys of all heads, and of the values."""
        return self.key_value_heads * self.head_size

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
