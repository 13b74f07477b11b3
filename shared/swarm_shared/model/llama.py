"""The model: a decoder of Llama's family, cut into stages.

Owns the arithmetic of forward passes and the names of parameters. Does not own initial values
(`swarm_shared.model.initialise`), the optimizer, or the transport of activations. The family is
Llama (Touvron et al. 2023, arXiv 2302.13971): RMSNorm (arXiv 1910.07467), rotary positions (arXiv
2104.09864) in the half-split convention of Hugging Face, SwiGLU (arXiv 2002.05202), grouped-query
attention (arXiv 2305.13245). Biases of attention (Qwen2, arXiv 2407.10671), norms of queries and
keys (Qwen3, arXiv 2505.09388), the head size and scaled rotary positions follow the configuration.
With low-rank adapters (LoRA, arXiv 2106.09685) they alone are trained; every other parameter is
frozen, and belongs to no flat vector, sum or state.

Parameter names equal those of Hugging Face's classes (LlamaForCausalLM, Qwen2ForCausalLM,
Qwen3ForCausalLM) and carry global layer indices, so that an export is a plain merge of the stages'
states. An adapter's matrices are `lora_A` and `lora_B` below their projection, as in peft.

In bfloat16 the parameters stay float32 and the residual stream is bfloat16 everywhere, inside a
stage as on its boundaries: where the model is cut never changes what it computes.

With bottlenecks the residual stream is narrow at every stage boundary, so that less of it is
transferred (after the compression-aware architectures of SWARM, Ryabinin et al. 2023, arXiv
2301.11913): the stage before normalises and projects it down, the stage after projects it up again.
Bottlenecks belong to the model, and the uncut model has them, too.

Shape suffixes: B sequences, T positions, D hidden size, F intermediate size, V vocabulary, N heads,
K key/value heads, H head size, P pairs of a head, C width of a bottleneck.
"""

# ruff: noqa: N815 (shape suffixes on tensors)

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor, nn

from swarm_shared.base.errors import ProtocolError
from swarm_shared.model.recomputation import recomputed
from swarm_shared.model.split_backward import HostWeights, product
from swarm_shared.run.manifest import StageRange
from swarm_shared.run.model_config import (
    AdapterConfig,
    AdapterTarget,
    ComputeDtype,
    ModelConfig,
    RopeScaling,
)

EMBEDDING_NAME = "model.embed_tokens.weight"

TORCH_DTYPES: dict[ComputeDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}

NamedParameters = list[tuple[str, nn.Parameter]]


class Linear(nn.Module):
    """A matrix with its bias and adapter, if any; the values are left to `initialise`, so none are
    drawn here.

    The bias is added beside the product, so that autograd gives its gradient, a sum over tokens,
    while the product's backward pass may be split. What an adapter computes is scaled where it is
    narrow.
    """

    def __init__(
        self, inputs: int, outputs: int, bias: bool = False, adapter: AdapterConfig | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.lora_A = None if adapter is None else Linear(inputs, adapter.rank)
        self.lora_B = None if adapter is None else Linear(adapter.rank, outputs)
        self.scale = 1.0 if adapter is None else adapter.scale
        self.host_weights: HostWeights | None = None
        """Provides the weight where it lies in host memory, and not on the stage's device."""

    def forward(self, x: Tensor) -> Tensor:
        output = product(x, self.weight, self.host_weights)
        if self.bias is not None:
            output = output + self.bias.to(output.dtype)
        if self.lora_A is not None and self.lora_B is not None:
            output = output + self.lora_B(self.lora_A(x) * self.scale)
        return output


class RmsNorm(nn.Module):
    """Root-mean-square normalisation, always in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.epsilon = epsilon

    def forward(self, x_BTD: Tensor) -> Tensor:
        wide_BTD = x_BTD.float()
        scale = torch.rsqrt(wide_BTD.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (self.weight * (wide_BTD * scale)).to(x_BTD.dtype)


class Rotary(nn.Module):
    """Tables of the rotary position embedding for every position of the longest sequence."""

    cos_TH: Tensor
    sin_TH: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        exponent_P = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
        frequency_P = _scaled(1.0 / (config.rope_theta**exponent_P), config)
        position = torch.arange(config.sequence_length, dtype=torch.float32)
        angle_TH = torch.outer(position, frequency_P).repeat(1, 2)
        scaling = config.rope_scaling
        factor = scaling.attention_factor if scaling.kind == "yarn" else 1.0
        self.register_buffer("cos_TH", angle_TH.cos() * factor, persistent=False)
        self.register_buffer("sin_TH", angle_TH.sin() * factor, persistent=False)

    def forward(self, x_BNTH: Tensor) -> Tensor:
        positions = x_BNTH.shape[-2]
        first, second = x_BNTH.chunk(2, dim=-1)
        rotated = torch.cat((-second, first), dim=-1)
        turned = x_BNTH * self.cos_TH[:positions] + rotated * self.sin_TH[:positions]
        return turned.to(x_BNTH.dtype)


def _scaled(frequency_P: Tensor, config: ModelConfig) -> Tensor:
    """Return the rotary frequencies, in radians a position, as the model's scaling changes them."""
    scaling = config.rope_scaling
    if scaling.kind == "none":
        return frequency_P
    divided_P = frequency_P / scaling.factor
    if scaling.kind == "linear":
        return divided_P
    kept_P = _kept_share(frequency_P, scaling, config.rope_theta)
    return (1 - kept_P) * divided_P + kept_P * frequency_P


def _kept_share(frequency_P: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Return how much of each frequency stays: 1 for the whole, 0 where it is divided."""
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    if scaling.kind == "llama3":
        turns_P = scaling.original_length * frequency_P / (2 * math.pi)
        return ((turns_P - low) / (high - low)).clamp(0, 1)
    pairs = len(frequency_P)

    def pair_of(turns: float) -> float:
        """The pair of coordinates that makes so many turns in the original length."""
        return pairs * math.log(scaling.original_length / (turns * 2 * math.pi)) / math.log(theta)

    # Whole pairs, within the width of a head, as the published code has them.
    # Floats, as a theta close to 1 gives pairs beyond an int64.
    first = float(max(math.floor(pair_of(high)), 0))
    last = float(min(math.ceil(pair_of(low)), 2 * pairs - 1))
    width = (last - first) or 0.001
    return 1 - ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0, 1)


def _projection(
    config: ModelConfig, name: AdapterTarget, inputs: int, outputs: int, bias: bool = False
) -> Linear:
    """Return a layer's matrix of this name, with an adapter if it is one of the targets."""
    adapters = config.adapters
    has_adapter = config.has_adapters and name in adapters.targets
    return Linear(inputs, outputs, bias, adapters if has_adapter else None)


def _has_kernel_for_groups(q_BNTH: Tensor) -> bool:
    """Whether torch has a fused kernel for several query heads to a key/value head. Of accelerators
    only flash attention is one, which has no float32; elsewhere torch keeps all T × T scores."""
    return q_BNTH.device.type == "cpu" or q_BNTH.dtype != torch.float32


def _repeated(x_BKTH: Tensor, heads: int) -> Tensor:
    """Give each query head a key/value head of its own."""
    group = heads // x_BKTH.shape[1]
    return x_BKTH[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)


class Attention(nn.Module):
    """Causal self-attention; several query heads share one key/value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.grouped = config.key_value_heads != config.heads
        hidden, bias = config.hidden_size, config.attention_bias != "none"
        output_bias = config.attention_bias == "all"
        self.q_proj = _projection(config, "q_proj", hidden, config.query_size, bias)
        self.k_proj = _projection(config, "k_proj", hidden, config.key_size, bias)
        self.v_proj = _projection(config, "v_proj", hidden, config.key_size, bias)
        self.o_proj = _projection(config, "o_proj", config.query_size, hidden, output_bias)
        norms = config.query_key_norm
        self.q_norm = RmsNorm(config.head_size, config.norm_epsilon) if norms else None
        self.k_norm = RmsNorm(config.head_size, config.norm_epsilon) if norms else None

    def forward(self, x_BTD: Tensor, rotary: Rotary) -> Tensor:
        heads = (*x_BTD.shape[:2], -1, self.head_size)
        q_BTNH, k_BTKH = self.q_proj(x_BTD).view(heads), self.k_proj(x_BTD).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        q_BNTH, k_BKTH = rotary(q_BTNH.transpose(1, 2)), rotary(k_BTKH.transpose(1, 2))
        v_BKTH = self.v_proj(x_BTD).view(heads).transpose(1, 2)
        grouped = self.grouped
        if grouped and not _has_kernel_for_groups(q_BNTH):
            k_BKTH, v_BKTH = (_repeated(each, q_BNTH.shape[1]) for each in (k_BKTH, v_BKTH))
            grouped = False
        mixed_BNTH = F.scaled_dot_product_attention(
            q_BNTH, k_BKTH, v_BKTH, is_causal=True, enable_gqa=grouped
        )
        output: Tensor = self.o_proj(mixed_BNTH.transpose(1, 2).flatten(2))
        return output


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self.gate_proj = _projection(config, "gate_proj", hidden, wide)
        self.up_proj = _projection(config, "up_proj", hidden, wide)
        self.down_proj = _projection(config, "down_proj", wide, hidden)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gated_BTF = F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD)
        output: Tensor = self.down_proj(gated_BTF)
        return output


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = RmsNorm(config.hidden_size, config.norm_epsilon)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.norm_epsilon)

    def forward(self, x_BTD: Tensor, rotary: Rotary) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rotary)
        output: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return output


class Embedding(nn.Module):
    """The token table; on the last stage of a split tied model it serves as the head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocabulary_size, config.hidden_size))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.embedding(tokens_BT, self.weight)


class Narrow(nn.Module):
    """The end of a stage with a bottleneck: projects the residual stream down."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RmsNorm(config.hidden_size, config.norm_epsilon)
        self.proj = Linear(config.hidden_size, config.bottleneck_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        narrow_BTC: Tensor = self.proj(self.norm(x_BTD))
        return narrow_BTC


class Widen(nn.Module):
    """The begin of a stage with a bottleneck: projects the stream up again."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.proj = Linear(config.bottleneck_size, config.hidden_size)

    def forward(self, narrow_BTC: Tensor) -> Tensor:
        x_BTD: Tensor = self.proj(narrow_BTC)
        return x_BTD


class Body(nn.Module):
    """The part that Hugging Face calls `model`; a stage holds a slice of it."""

    def __init__(
        self, config: ModelConfig, stage_range: StageRange, is_first: bool, is_last: bool
    ) -> None:
        super().__init__()
        self.embed_tokens = (
            Embedding(config) if is_first or (is_last and config.tie_embeddings) else None
        )
        self.layers = nn.ModuleDict(
            {
                str(index): DecoderLayer(config)
                for index in range(stage_range.first_layer, stage_range.end_layer)
            }
        )
        self.norm = RmsNorm(config.hidden_size, config.norm_epsilon) if is_last else None
        first, end = stage_range.first_layer, stage_range.end_layer
        places = [at for at in config.bottlenecks if first <= at <= end]
        self.narrow = nn.ModuleDict(
            {str(at): Narrow(config) for at in places if at > first or is_first}
        )
        self.widen = nn.ModuleDict({str(at): Widen(config) for at in places if at < end or is_last})

    def bottleneck(self, at: int, x: Tensor) -> Tensor:
        """Apply the half of the bottleneck before layer `at` that this stage holds, or both, or
        neither."""
        if str(at) in self.narrow:
            x = self.narrow[str(at)](x)
        if str(at) in self.widen:
            x = self.widen[str(at)](x)
        return x


class LayerOffload(Protocol):
    """Copies what autograd keeps of some layers to host memory, and back when it is needed."""

    @property
    def layers(self) -> int:
        """The number of layers: the stage's first ones."""

    def layer(self) -> AbstractContextManager[None]:
        """A layer is computed within."""

    def followed_by(self, output_BTD: Tensor) -> None:
        """Copy the last layer back when the backward pass of the layer behind it, which has this
        output, begins."""


class Stage(nn.Module):
    """Consecutive layers of the model; the whole model is the stage that is first and last."""

    def __init__(
        self,
        config: ModelConfig,
        stage_range: StageRange,
        is_first: bool,
        is_last: bool,
        dtype: ComputeDtype = "float32",
    ) -> None:
        super().__init__()
        assert stage_range.end_layer <= config.layers
        self.config = config
        self.stage_range = stage_range
        self.is_first = is_first
        self.is_last = is_last
        self.compute_dtype = TORCH_DTYPES[dtype]
        self.model = Body(config, stage_range, is_first, is_last)
        self.lm_head = (
            Linear(config.hidden_size, config.vocabulary_size)
            if is_last and not config.tie_embeddings
            else None
        )
        self.rotary = Rotary(config)
        self.head_table: Tensor | None = None
        """Table the head computes with where set: a leaf that shares the tied table's memory, so
        that the gradients of the table's two uses are separate."""
        if config.has_adapters:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(is_adapter(name))

    @property
    def holds_tied_replica(self) -> bool:
        """Whether the token table also lives in another stage (both ends of a split tied model)."""
        return self.config.tie_embeddings and self.is_first != self.is_last

    @property
    def device(self) -> torch.device:
        return self.rotary.cos_TH.device

    def own_parameters(self) -> NamedParameters:
        """Return the trained parameters that this stage alone holds, in the order in which the data
        passes them."""
        own = [
            (name, parameter)
            for name, parameter in self.named_parameters()
            if parameter.requires_grad and not (self.holds_tied_replica and name == EMBEDDING_NAME)
        ]
        return sorted(own, key=lambda entry: _place(entry[0]))

    def tied_parameters(self) -> NamedParameters:
        """Return the trained parameters replicated in the first and last stage; their gradients
        must be summed."""
        return [
            (name, parameter)
            for name, parameter in self.named_parameters()
            if parameter.requires_grad and self.holds_tied_replica and name == EMBEDDING_NAME
        ]

    def all_parameters(self) -> NamedParameters:
        """Return own parameters, then tied ones: the order of every flat vector. Frozen parameters
        are in none."""
        return self.own_parameters() + self.tied_parameters()

    def matrices(self) -> Iterator[Linear]:
        """Yield the layers' projections, in the order in which the forward pass comes to them."""
        for layer in self.model.layers.values():
            assert isinstance(layer, DecoderLayer)
            attention, mlp = layer.self_attn, layer.mlp
            yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
            yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)

    def frozen_parameters(self) -> NamedParameters:
        """Return the parameters that are not trained: where there are adapters, all others."""
        return [(name, one) for name, one in self.named_parameters() if not one.requires_grad]

    def forward(
        self, inputs: Tensor, targets_BT: Tensor | None = None, recomputed_layers: int = 0,
        offload: LayerOffload | None = None,
    ) -> Tensor:  # fmt: skip
        """Map token ids (first stage) or activations to activations.

        The last stage returns the sum over tokens of the cross entropy in nats, or the float32
        logits where there are no targets. What autograd keeps of the first layers waits in host
        memory, as far as `offload` says. Of the `recomputed_layers` after them it keeps only the
        input; they are computed again in the backward pass, with the same result.
        """
        x_BTD = self.hidden(inputs, recomputed_layers, offload)
        if not self.is_last:
            return x_BTD
        logits_BTV = self.head(x_BTD)
        if targets_BT is None:
            return logits_BTV
        check_tokens_shape(targets_BT, self.config.sequence_length)
        if targets_BT.shape != inputs.shape[:2]:
            raise ProtocolError(
                f"targets have shape {tuple(targets_BT.shape)}; that of the inputs, "
                f"{tuple(inputs.shape[:2])}, is needed"
            )
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")

    def hidden(
        self, inputs: Tensor, recomputed_layers: int = 0, offload: LayerOffload | None = None
    ) -> Tensor:
        """Return the residual stream after this stage's layers, before norm and head; as narrow as
        it is sent to the next stage."""
        with self._autocast():
            first, end = self.stage_range.first_layer, self.stage_range.end_layer
            offloaded = 0 if offload is None else offload.layers
            x_BTD = self.model.bottleneck(first, self._enter(inputs))
            for index, layer in self.model.layers.items():
                if int(index) > first:
                    x_BTD = self.model.bottleneck(int(index), x_BTD)
                number = int(index) - first
                if offload is not None and number < offloaded:
                    with offload.layer():
                        x_BTD = layer(x_BTD, self.rotary)
                elif number < offloaded + recomputed_layers:
                    x_BTD = recomputed(partial(layer, rotary=self.rotary), x_BTD, self._autocast)
                else:
                    x_BTD = layer(x_BTD, self.rotary)
                if offload is not None and number == offloaded:
                    offload.followed_by(x_BTD)
            return self.model.bottleneck(end, x_BTD) if end > first else x_BTD

    def head(self, x_BTD: Tensor) -> Tensor:
        """Return float32 logits from the residual stream; last stage only."""
        assert self.model.norm is not None, "only the last stage has a head"
        table = self.lm_head if self.lm_head is not None else self.model.embed_tokens
        assert table is not None
        weight = table.weight if self.head_table is None else self.head_table
        with self._autocast():
            return product(self.model.norm(x_BTD), weight).float()

    def _enter(self, inputs: Tensor) -> Tensor:
        if self.is_first:
            check_tokens_shape(inputs, self.config.sequence_length)
            assert self.model.embed_tokens is not None
            embedded: Tensor = self.model.embed_tokens(inputs).to(self.compute_dtype)
            return embedded
        check_activations(inputs, self.config, self.compute_dtype)
        return inputs

    def _autocast(self) -> AbstractContextManager[object]:
        if self.compute_dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.compute_dtype)


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name belongs to an adapter."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def _place(name: str) -> tuple[float, int]:
    """Return the position of a parameter in the data's order: before which layer, and its order
    there."""
    words = name.split(".")
    if words[:2] == ["model", "embed_tokens"]:
        return (-1.0, 0)
    if words[0] == "model" and words[1] in _PER_LAYER_MODULES:
        return (float(words[2]), _PER_LAYER_MODULES.index(words[1]))
    return (float("inf"), 0)


_PER_LAYER_MODULES = ("narrow", "widen", "layers")


def check_tokens_shape(tokens_BT: Tensor, longest: int) -> None:
    """Check shape and dtype only: reading values would stall a GPU (see `check_token_values`)."""
    shape = tuple(tokens_BT.shape)
    if len(shape) != 2 or not 1 <= shape[1] <= longest or tokens_BT.dtype != torch.int64:
        raise ProtocolError(
            f"token ids have shape {shape} and dtype {tokens_BT.dtype}; (sequences, 1 to "
            f"{longest}) and int64 are needed"
        )


def check_token_values(tokens_BT: Tensor, vocabulary_size: int) -> None:
    """Refuse ids outside the vocabulary.

    Called on the CPU, before ids or targets from a remote go to a GPU: an id out of range aborts a
    CUDA context, and a negative target would silently drop out of the loss.
    """
    if tokens_BT.numel() == 0:
        raise ProtocolError("a microbatch without tokens; at least one is needed")
    low, high = (int(bound) for bound in torch.aminmax(tokens_BT))
    if low < 0 or high >= vocabulary_size:
        raise ProtocolError(
            f"token ids from {low} to {high}; the vocabulary holds 0 to {vocabulary_size - 1}"
        )


def check_activations(x_BTD: Tensor, config: ModelConfig, dtype: torch.dtype) -> None:
    shape = tuple(x_BTD.shape)
    fits = len(shape) == 3 and 1 <= shape[1] <= config.sequence_length
    if not fits or shape[2] != config.boundary_size or x_BTD.dtype != dtype:
        raise ProtocolError(
            f"activations have shape {shape} and dtype {x_BTD.dtype}; (sequences, up to "
            f"{config.sequence_length}, {config.boundary_size}) and {dtype} are needed"
        )
