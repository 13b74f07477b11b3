"""The cut of the model into stages, from a profile of its parts.

Owns the profile's dataclasses, the memory estimate of a stage and the planner; all pure and free of
torch. The measuring is in `swarm_shared.model.profile`. The planner minimises the slowest stage
over contiguous cuts by dynamic programming, as in PipeDream (Narayanan et al., SOSP 2019, arXiv
1806.03377).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from swarm_shared.base.errors import ConfigurationError
from swarm_shared.base.memory import StageMemory
from swarm_shared.run.manifest import StageRange

DEVICE_BYTES_PER_PARAMETER = 4 + 4 + 4
"""Bytes of a float32 weight, the step's sum of gradients (int32 where they are counted), and one
microbatch's gradient."""

STALE_BYTES_PER_PARAMETER = 4 + 4
"""Additional bytes of the device for each step that gradients lag behind: a weight of another
version, and the sum of gradients computed with it."""

OPTIMIZER_BYTES_PER_PARAMETER = 8 + 4
"""Bytes in host memory of AdamW's two moments and, while a step is applied, the mean gradient."""

AVERAGED_VECTORS = 2
"""Flat vectors of the stage's size in host memory: this peer's sums, and the sums of all."""

GRAPHS = 2
"""Microbatches whose autograd graph a peer has in memory: one waits for its gradient while another
one is computed."""


@dataclass(frozen=True, slots=True)
class PartProfile:
    """The cost of one part of the model, for one microbatch."""

    flops: int
    """FLOPs of forward and backward."""
    parameters: int
    saved_activation_bytes: int
    """Bytes autograd keeps between forward and backward."""


@dataclass(frozen=True, slots=True)
class ModelProfile:
    embedding: PartProfile
    layers: tuple[PartProfile, ...]
    head: PartProfile
    """Final norm, head and loss; its parameters include the token table of a tied model."""
    tied_parameters: int
    """Size of the tied token table (held twice when the model is split); 0 when untied."""
    boundary_activation_bytes: int
    """Bytes that cross each boundary forwards, and as gradient backwards, per microbatch."""


def stage_flops(
    profile: ModelProfile, stage_range: StageRange, is_first: bool, is_last: bool
) -> int:
    return sum(part.flops for part in _parts(profile, stage_range, is_first, is_last))


def stage_parameters(
    profile: ModelProfile, stage_range: StageRange, is_first: bool, is_last: bool
) -> int:
    parts = _parts(profile, stage_range, is_first, is_last)
    shared = profile.tied_parameters if is_first and is_last else 0
    return sum(part.parameters for part in parts) - shared


def stage_memory(
    profile: ModelProfile,
    stage_range: StageRange,
    is_first: bool,
    is_last: bool,
    staleness: int = 0,
    exact: bool = False,
) -> StageMemory:
    """Return the memory of a peer of this stage.

    A stage's input is part of what its graph keeps, and its output waits for the gradient as well.
    At least, a peer keeps the input of each layer for one microbatch, and one layer's graph at a
    time (Chen et al. 2016, arXiv 1604.06174). `staleness` is the run's: the steps that gradients
    lag behind. `exact`: its gradients are counted (`codecs.average`).
    """
    parts = _parts(profile, stage_range, is_first, is_last)
    layers = profile.layers[stage_range.first_layer : stage_range.end_layer]
    boundary = profile.boundary_activation_bytes
    saved = sum(part.saved_activation_bytes for part in parts)
    in_layers = [part.saved_activation_bytes for part in layers]
    ends = saved - sum(in_layers)
    one_layer = len(layers) * boundary + max(in_layers, default=0)
    output = 0 if is_last else boundary
    parameters = stage_parameters(profile, stage_range, is_first, is_last)
    of_parameters = parameter_memory(parameters, staleness, exact)
    return of_parameters + StageMemory(
        # A graph whole is smaller where a stage has a single layer.
        device_bytes=output + ends + min(one_layer, sum(in_layers)),
        comfortable_bytes=GRAPHS * (saved + output),
    )


def parameter_memory(parameters: int, staleness: int, exact: bool) -> StageMemory:
    """Return the memory of a stage with so many parameters, without activations."""
    device = device_bytes_per_parameter(staleness) * parameters
    return StageMemory(
        device_bytes=device,
        comfortable_bytes=device,
        host_bytes=host_bytes_per_parameter(exact) * parameters,
    )


def device_bytes_per_parameter(staleness: int) -> int:
    return DEVICE_BYTES_PER_PARAMETER + STALE_BYTES_PER_PARAMETER * staleness


def host_bytes_per_parameter(exact: bool) -> int:
    """Return the bytes in host memory; a sum is a float64 where gradients are counted."""
    return OPTIMIZER_BYTES_PER_PARAMETER + AVERAGED_VECTORS * (8 if exact else 4)


def plan_stages(
    profile: ModelProfile,
    stage_count: int,
    staleness: int = 0,
    exact: bool = False,
) -> tuple[StageRange, ...]:
    """Return the cut whose slowest stage has the fewest FLOPs; of equal cuts, the one whose largest
    stage is smallest, device and host together.

    Every stage gets a layer where there are enough; with one or two stages more than layers, the
    first or last holds only the embedding or the head.
    """
    _check_stage_count(profile, stage_count)
    parameter_bytes = device_bytes_per_parameter(staleness) + host_bytes_per_parameter(exact)
    tables = _Tables(profile, stage_count, parameter_bytes)
    cost, _ = _minimise(profile, stage_count, tables.cost, lambda *_: True)
    _, ends = _minimise(profile, stage_count, tables.memory, lambda *cut: tables.cost(*cut) <= cost)
    starts = (0, *ends[:-1])
    return tuple(
        StageRange(first_layer=start, end_layer=end)
        for start, end in zip(starts, ends, strict=True)
    )


class _Tables:
    """Cost and memory of any stage in constant time, from prefix sums over the layers."""

    def __init__(self, profile: ModelProfile, stage_count: int, parameter_bytes: int) -> None:
        self.profile = profile
        self.stage_count = stage_count
        self.flops = list(accumulate((part.flops for part in profile.layers), initial=0))
        self.fixed = list(accumulate((part.parameters for part in profile.layers), initial=0))
        saved = (part.saved_activation_bytes for part in profile.layers)
        self.saved = list(accumulate(saved, initial=0))
        self.bytes_per_parameter = parameter_bytes

    def cost(self, stage: int, start: int, end: int) -> float:
        flops = self.flops[end] - self.flops[start]
        if stage == 0:
            flops += self.profile.embedding.flops
        if stage == self.stage_count - 1:
            flops += self.profile.head.flops
        return flops

    def memory(self, stage: int, start: int, end: int) -> float:
        """Return the comfortable memory of device and host together, as `stage_memory` has it; a
        test compares them."""
        profile = self.profile
        is_first, is_last = stage == 0, stage == self.stage_count - 1
        parameters = self.fixed[end] - self.fixed[start]
        saved = self.saved[end] - self.saved[start]
        if is_first:
            parameters += profile.embedding.parameters
            saved += profile.embedding.saved_activation_bytes
        if is_last:
            parameters += profile.head.parameters
            saved += profile.head.saved_activation_bytes
        else:
            saved += profile.boundary_activation_bytes
        if is_first and is_last:
            parameters -= profile.tied_parameters
        return self.bytes_per_parameter * parameters + GRAPHS * saved


_Figure = Callable[[int, int, int], float]
_Allowed = Callable[[int, int, int], bool]


def _minimise(
    profile: ModelProfile, stage_count: int, figure: _Figure, allowed: _Allowed
) -> tuple[float, tuple[int, ...]]:
    """Minimise the maximum of `figure(stage, start, end)` over allowed cuts; return it and the
    stages' ends.

    The value is infinite where no cut is allowed.
    """
    layers = len(profile.layers)
    minimum = _minimum_lengths(layers, stage_count)
    best = [0.0] + [math.inf] * layers
    choices: list[list[int]] = []
    for stage in range(stage_count):
        following = [math.inf] * (layers + 1)
        choice = [0] * (layers + 1)
        for end in range(layers + 1):
            # Figures grow with length, so a longer stage (an earlier start) cannot be better.
            for start in range(end - minimum[stage], -1, -1):
                own = figure(stage, start, end)
                if own >= following[end]:
                    break
                value = max(best[start], own)
                if value < following[end] and allowed(stage, start, end):
                    following[end], choice[end] = value, start
        best = following
        choices.append(choice)
    ends: list[int] = []
    end = layers
    for choice in reversed(choices):
        ends.append(end)
        end = choice[end]
    return best[layers], tuple(reversed(ends))


def _minimum_lengths(layers: int, stage_count: int) -> list[int]:
    if layers >= stage_count:
        return [1] * stage_count
    return [0 if stage in (0, stage_count - 1) else 1 for stage in range(stage_count)]


def _check_stage_count(profile: ModelProfile, stage_count: int) -> None:
    most = len(profile.layers) + 2
    if not 1 <= stage_count <= most:
        raise ConfigurationError(
            f"{stage_count} stages were asked for; a model of {len(profile.layers)} layers can "
            f"be cut into 1 to {most}"
        )


def _parts(
    profile: ModelProfile, stage_range: StageRange, is_first: bool, is_last: bool
) -> list[PartProfile]:
    parts = list(profile.layers[stage_range.first_layer : stage_range.end_layer])
    if is_first:
        parts.insert(0, profile.embedding)
    if is_last:
        parts.append(profile.head)
    return parts
