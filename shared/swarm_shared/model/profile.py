"""The cost of a model's parts, measured without a device.

Fills `swarm_shared.run.stage_cut.ModelProfile`: FLOPs are counted by FlopCounterMode on the meta
device, saved activations by asking autograd what it keeps under FakeTensorMode, which picks the
kernels of a real device but allocates nothing. FLOPs of causal attention are counted in full, as
the field does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from swarm_shared.model.llama import TORCH_DTYPES, Stage
from swarm_shared.run.manifest import StageRange
from swarm_shared.run.model_config import ComputeDtype, ModelConfig
from swarm_shared.run.stage_cut import LayerMatrices, ModelProfile, PartProfile


def profile_layers(
    config: ModelConfig, sequences_per_microbatch: int, dtype: ComputeDtype = "float32"
) -> ModelProfile:
    """Profile the embedding, one layer (all are alike) and the head, for one microbatch."""
    layer = _profile_part(_Part(config, sequences_per_microbatch, dtype, 0, 1, False, False))
    ends = config.layers
    tokens = sequences_per_microbatch * config.sequence_length
    return ModelProfile(
        embedding=_profile_part(_Part(config, sequences_per_microbatch, dtype, 0, 0, True, False)),
        layers=(layer,) * config.layers,
        head=_profile_part(_Part(config, sequences_per_microbatch, dtype, ends, ends, False, True)),
        tied_parameters=config.vocabulary_size * config.hidden_size * config.tie_embeddings,
        boundary_activation_bytes=tokens * config.hidden_size * TORCH_DTYPES[dtype].itemsize,
        tied_is_frozen=config.has_adapters,
        matrices=LayerMatrices.of(config),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    config: ModelConfig
    sequences: int
    dtype: ComputeDtype
    first_layer: int
    end_layer: int
    is_first: bool
    is_last: bool

    def build(self, dtype: ComputeDtype) -> Stage:
        cut = StageRange(first_layer=self.first_layer, end_layer=self.end_layer)
        return Stage(self.config, cut, self.is_first, self.is_last, dtype)

    def forward(self, stage: Stage) -> Tensor:
        shape = (self.sequences, self.config.sequence_length)
        tokens_BT = torch.zeros(shape, dtype=torch.int64)
        if self.is_first:
            output: Tensor = stage(tokens_BT, tokens_BT if self.is_last else None)
            return output
        x_BTD = torch.zeros(
            *shape, self.config.hidden_size, dtype=stage.compute_dtype, requires_grad=True
        )
        output = stage(x_BTD, tokens_BT if self.is_last else None)
        return output


def _profile_part(part: _Part) -> PartProfile:
    # FLOPs do not depend on the dtype, and the meta device knows no autocast.
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        stage = part.build("float32")
        output = part.forward(stage)
        if output.requires_grad:  # that of a frozen token table does not
            torch.autograd.backward(output, torch.ones_like(output))
    trained = sum(one.numel() for one in stage.parameters() if one.requires_grad)
    frozen = sum(one.numel() for _, one in stage.frozen_parameters())
    return PartProfile(int(counter.get_total_flops()), trained, _saved_bytes(part), frozen)


def _saved_bytes(part: _Part) -> int:
    """Return the bytes of the distinct storages that autograd keeps, without parameters and
    tables."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[_storage_key(tensor)] = tensor
        return tensor

    with FakeTensorMode():
        stage = part.build(part.dtype)
        own = {_storage_key(tensor) for tensor in (*stage.parameters(), *stage.buffers())}
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            part.forward(stage)
        return sum(
            tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in own
        )


def _storage_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
