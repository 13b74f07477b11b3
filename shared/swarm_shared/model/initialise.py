"""Initial values of parameters, and stages built from a manifest.

Owns the map (seed, parameter name, shape) -> values. It is bitwise the same on every machine and
for every way of cutting the model, so peers of version 0 need not exchange parameters.

torch's own normal sampler cannot guarantee that: it takes logarithms and cosines whose last bits
depend on the processor's vector unit and the C library. Here random bits come from Philox (Salmon
et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; a counter and a key, exact integers,
stream fixed by numpy's compatibility policy) and 16 of them pick one of 65,536 equally likely
quantiles of the normal distribution, or of the uniform one for adapters. Only a table look-up and
one float32 multiplication, both exact everywhere, produce the values.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from functools import cache
from statistics import NormalDist

import numpy as np
import torch

from swarm_shared.model.llama import Stage, is_adapter
from swarm_shared.run.manifest import Manifest, StageRange

STANDARD_DEVIATION = 0.02
RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight")
WIDENING = "model.widen."
BOTTLENECKS = ("model.narrow.", WIDENING)
_SECOND_OF_ADAPTER = ".lora_B.weight"
_QUANTILES = 1 << 16
_CHUNK_ELEMENTS = 1 << 22

_Quantiles = np.ndarray[tuple[int], np.dtype[np.float32]]


def initialise(stage: Stage, seed: int) -> None:
    """Fill every parameter of `stage` in place, frozen ones included.

    Matrices are normal with standard deviation 0.02; those that write into the residual stream are
    smaller by sqrt(2 · layers) (Radford et al. 2019, GPT-2), so that the stream's variance does not
    grow with depth. Norms start at one, biases at zero. A bottleneck's down-projection keeps the
    variance of its input, and its up-projection has that of token embeddings.
    """
    _initialise(stage.named_parameters(), stage.config.layers, seed)


def initialise_trained(stage: Stage, seed: int) -> None:
    """Fill the trained parameters as `initialise` does, and leave frozen ones as they are.

    The first matrix of an adapter is uniform within 1 / sqrt(inputs), the second zero, as in peft:
    at first an adapter changes nothing.
    """
    _initialise(stage.all_parameters(), stage.config.layers, seed)


@torch.no_grad()
def _initialise(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], layers: int, seed: int
) -> None:
    for name, parameter in parameters:
        if parameter.ndim < 2:
            parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
            continue
        if is_adapter(name):
            if name.endswith(_SECOND_OF_ADAPTER):
                parameter.zero_()
            else:
                bound = 1 / math.sqrt(parameter.shape[1])
                _fill(parameter, _uniform_quantiles(), bound, seed, name)
            continue
        deviation = STANDARD_DEVIATION
        if name.startswith(BOTTLENECKS):
            deviation = 1 / math.sqrt(parameter.shape[1])
        if name.startswith(WIDENING):
            deviation *= STANDARD_DEVIATION
        if name.endswith(RESIDUAL_OUTPUTS):
            deviation /= math.sqrt(2 * layers)
        _fill(parameter, _normal_quantiles(), deviation, seed, name)


def build_stage(manifest: Manifest, stage_index: int, device: torch.device | str = "cpu") -> Stage:
    """Build stage `stage_index` of the run at version 0."""
    stage = empty_stage(manifest, stage_index, device)
    initialise(stage, manifest.training.seed)
    return stage


def build_whole(manifest: Manifest, device: torch.device | str = "cpu") -> Stage:
    """Build the uncut model of the run at version 0."""
    stage = empty_whole(manifest, device)
    initialise(stage, manifest.training.seed)
    return stage


def empty_stage(manifest: Manifest, stage_index: int, device: torch.device | str = "cpu") -> Stage:
    """Build stage `stage_index` of the run with parameters of any value, which are to be loaded."""
    assert 0 <= stage_index < manifest.stage_count
    with torch.device(device):
        return Stage(
            manifest.model,
            manifest.stages[stage_index],
            is_first=stage_index == 0,
            is_last=stage_index == manifest.stage_count - 1,
            dtype=manifest.training.dtype,
        )


def empty_whole(manifest: Manifest, device: torch.device | str = "cpu") -> Stage:
    """Build the uncut model of the run with parameters of any value, which are to be loaded."""
    everything = StageRange(first_layer=0, end_layer=manifest.model.layers)
    with torch.device(device):
        return Stage(
            manifest.model, everything, is_first=True, is_last=True, dtype=manifest.training.dtype
        )


def _fill(
    parameter: torch.Tensor, quantiles: _Quantiles, factor: float, seed: int, name: str
) -> None:
    """Fill in chunks, so that a table of billions of values needs little memory besides itself."""
    if parameter.is_meta:
        return
    key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    source = np.random.Philox(key=int.from_bytes(key, "little"))
    flat = parameter.view(-1)
    scaled = (quantiles * np.float32(factor)).astype(np.float32)
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        count = min(_CHUNK_ELEMENTS, flat.numel() - start)
        words = np.asarray(source.random_raw(-(-count // 4)), dtype="<u8")
        values = torch.from_numpy(scaled[words.view("<u2")[:count]])
        flat[start : start + count].copy_(values)


@cache
def _uniform_quantiles() -> _Quantiles:
    """Return midpoint quantiles of the uniform distribution from -1 to 1, which are exact."""
    return ((2 * np.arange(_QUANTILES) + 1) / _QUANTILES - 1).astype(np.float32)


@cache
def _normal_quantiles() -> _Quantiles:
    """Return midpoint quantiles; rounding to float32 hides the last bits of the C library's log."""
    normal = NormalDist()
    table = [normal.inv_cdf((index + 0.5) / _QUANTILES) for index in range(_QUANTILES)]
    return np.array(table, dtype=np.float32)
