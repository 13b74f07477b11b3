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

from swarm_shared.base.errors import CapacityError, ConfigurationError
from swarm_shared.base.memory import MemoryOffer, StageMemory
from swarm_shared.run.graph_sizes import GRAPHS, GraphSizes
from swarm_shared.run.manifest import StageRange
from swarm_shared.run.model_config import ModelConfig

DEVICE_BYTES_PER_PARAMETER = 4 + 4 + 4
"""Bytes of a float32 weight, the step's sum of gradients (int32 where they are counted), and one
microbatch's gradient."""

FROZEN_BYTES_PER_PARAMETER = 4
"""Bytes of the device for a float32 weight that is not trained; all versions share it."""

STALE_BYTES_PER_PARAMETER = 4 + 4
"""Additional bytes of the device for each step that gradients lag behind: a weight of another
version, and the sum of gradients computed with it."""

OPTIMIZER_BYTES_PER_PARAMETER = 8 + 4
"""Bytes in host memory of AdamW's two moments and, while a step is applied, the mean gradient."""

AVERAGED_VECTORS = 2
"""Flat vectors of the stage's size in host memory: this peer's sums, and the sums of all."""

WEIGHT_BYTES = 4

STREAM_BUFFERS = 2
"""Matrices on the device at once, of those that lie in host memory, and as many of their gradients:
one is computed with, or computed, while another one is copied."""


@dataclass(frozen=True, slots=True)
class LayerMatrices:
    """The matrices of one layer, adapters apart, in parameters."""

    total: int = 0
    largest: int = 0
    are_frozen: bool = False

    @classmethod
    def of(cls, config: ModelConfig) -> LayerMatrices:
        hidden, wide = config.hidden_size, config.intermediate_size
        attention = (hidden * config.query_size, hidden * config.key_size)
        total = 2 * sum(attention) + 3 * hidden * wide
        return cls(total, max(*attention, hidden * wide), config.has_adapters)

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes of the device for matrices that lie in host memory, for their gradients,
        and for what is computed beside them: without the gradients of the whole stage, the most is
        needed in the middle of a backward pass."""
        kinds = 2 if self.are_frozen else 3
        return WEIGHT_BYTES * STREAM_BUFFERS * kinds * self.largest

    def streamable_bytes(self, layers: int, staleness: int) -> int:
        """Return the bytes of the device that are free where the matrices of so many layers, and
        their gradients, lie in host memory. Frozen ones are the same for all versions."""
        kept = 1 if self.are_frozen else 2 + staleness
        return max(0, WEIGHT_BYTES * layers * kept * self.total - self.buffer_bytes)


@dataclass(frozen=True, slots=True)
class PartProfile:
    """The cost of one part of the model, for one microbatch."""

    flops: int
    """FLOPs of forward and backward."""
    parameters: int
    saved_activation_bytes: int
    """Bytes autograd keeps between forward and backward."""
    frozen_parameters: int = 0
    """Parameters that are not trained: `parameters` are the others."""

    def plus(self, other: PartProfile, sign: int = 1) -> PartProfile:
        return PartProfile(
            self.flops + sign * other.flops,
            self.parameters + sign * other.parameters,
            self.saved_activation_bytes + sign * other.saved_activation_bytes,
            self.frozen_parameters + sign * other.frozen_parameters,
        )


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
    tied_is_frozen: bool = False
    """Whether the tied token table is not trained."""
    matrices: LayerMatrices = LayerMatrices()
    """Of each layer, what may lie in host memory."""


class StageProfiles:
    """The profile of any stage in constant time, from prefix sums over the layers."""

    def __init__(self, profile: ModelProfile) -> None:
        self._model = profile
        none = PartProfile(0, 0, 0)
        self._sums = list(accumulate(profile.layers, PartProfile.plus, initial=none))

    def stage(self, start: int, end: int, is_first: bool, is_last: bool) -> PartProfile:
        part = self._sums[end].plus(self._sums[start], -1)
        if is_first:
            part = part.plus(self._model.embedding)
        if is_last:
            part = part.plus(self._model.head)
        if is_first and is_last:
            tied = self._model.tied_parameters
            frozen = tied if self._model.tied_is_frozen else 0
            part = part.plus(PartProfile(0, tied - frozen, 0, frozen), -1)
        return part

    def graphs_bytes(self, start: int, end: int, is_first: bool, is_last: bool) -> int:
        """Return the bytes of as many whole graphs as a peer keeps. A stage's input is part of what
        its graph keeps, and its output waits for the gradient as well."""
        saved = self.stage(start, end, is_first, is_last).saved_activation_bytes
        return GRAPHS * (saved + (0 if is_last else self._model.boundary_activation_bytes))

    def memory(self, cut: tuple[int, int, bool, bool], staleness: int, exact: bool) -> StageMemory:
        """Return the memory of a peer of the stage, as `stage_memory` describes it; `cut` has the
        arguments of `stage`."""
        start, end, _, is_last = cut
        part, boundary = self.stage(*cut), self._model.boundary_activation_bytes
        in_layers = [layer.saved_activation_bytes for layer in self._model.layers[start:end]]
        ends = part.saved_activation_bytes - sum(in_layers) + (0 if is_last else boundary)
        microbatches = _microbatches(is_last)
        least = microbatches * (len(in_layers) * boundary + ends) + max(in_layers, default=0)
        comfortable = self.graphs_bytes(*cut)
        held = parameter_memory(part.parameters, staleness, exact, part.frozen_parameters)
        return held + StageMemory(
            device_bytes=min(least, comfortable),
            comfortable_bytes=comfortable,
            streamable_bytes=self._model.matrices.streamable_bytes(end - start, staleness),
            stream_buffer_bytes=self._model.matrices.buffer_bytes,
        )


def stage_profile(
    profile: ModelProfile, stage_range: StageRange, is_first: bool, is_last: bool
) -> PartProfile:
    """Return the cost of one stage."""
    ends = (stage_range.first_layer, stage_range.end_layer)
    return StageProfiles(profile).stage(*ends, is_first, is_last)


def stage_memory(
    profile: ModelProfile,
    stage_range: StageRange,
    is_first: bool,
    is_last: bool,
    staleness: int = 0,
    exact: bool = False,
) -> StageMemory:
    """Return the memory of a peer of this stage.

    At least, a peer keeps the input of each layer for as many microbatches, and one layer's graph
    at a time (Chen et al. 2016, arXiv 1604.06174); the last stage has one microbatch at a time.
    `staleness` is the run's: the steps that gradients lag behind. `exact`: its gradients are
    counted (`codecs.average`).
    """
    ends = (stage_range.first_layer, stage_range.end_layer)
    return StageProfiles(profile).memory((*ends, is_first, is_last), staleness, exact)


def parameter_memory(
    parameters: int, staleness: int, exact: bool, frozen_parameters: int = 0
) -> StageMemory:
    """Return the memory of a stage with so many trained and frozen parameters, without
    activations."""
    device = device_bytes_per_parameter(staleness) * parameters
    device += FROZEN_BYTES_PER_PARAMETER * frozen_parameters
    return StageMemory.bounded(
        device_bytes=device,
        comfortable_bytes=device,
        host_bytes=host_bytes_per_parameter(exact) * parameters,
    )


def device_bytes_per_parameter(staleness: int) -> int:
    return DEVICE_BYTES_PER_PARAMETER + STALE_BYTES_PER_PARAMETER * staleness


def host_bytes_per_parameter(exact: bool) -> int:
    """Return the bytes in host memory; a sum is a float64 where gradients are counted."""
    return OPTIMIZER_BYTES_PER_PARAMETER + AVERAGED_VECTORS * (8 if exact else 4)


def graph_sizes(
    memory: StageMemory, held: StageMemory, layers: int, input_bytes: int, is_last: bool
) -> GraphSizes:
    """Return the sizes of a stage's graphs, of which `StageProfiles.memory` has made its memory.

    `held` is what the parameters take of `memory`, `input_bytes` the input of a layer. Where one
    microbatch of one layer is computed at a time, what is kept of the layer and of the ends cannot
    be told apart, nor does it matter. Figures that no profile has made give sizes all the same.
    """
    graph = max(0, memory.comfortable_bytes - held.device_bytes) // GRAPHS
    least = max(0, memory.device_bytes - held.device_bytes)
    microbatches = _microbatches(is_last)
    layer = graph // max(1, layers)
    if least < GRAPHS * graph and microbatches * layers > 1:
        # least = microbatches * (layers * input + ends) + layer, and graph = layers * layer + ends
        known = microbatches * (layers * input_bytes + graph) - least
        layer = min(layer, max(0, known) // (microbatches * layers - 1))
    return GraphSizes(layers, layer, input_bytes, graph - layers * layer)


def _microbatches(is_last: bool) -> int:
    """Return how many microbatches' inputs of layers a peer keeps at least."""
    return 1 if is_last else GRAPHS


StageCost = Callable[[PartProfile, bool, bool], float]
"""What a stage takes, from its profile and whether it is the first and the last one. It grows with
the layers of a stage."""


def flops_cost(part: PartProfile, is_first: bool, is_last: bool) -> float:
    return part.flops


def plan_stages(
    profile: ModelProfile,
    stage_count: int,
    staleness: int = 0,
    exact: bool = False,
    cost: StageCost = flops_cost,
    offer: MemoryOffer | None = None,
) -> tuple[StageRange, ...]:
    """Return the cut whose slowest stage costs least; of equal cuts, the one whose largest stage is
    smallest, device and host together.

    Every stage gets a layer where there are enough; with one or two stages more than layers, the
    first or last holds only the embedding or the head. CapacityError if no cut has only stages that
    `offer` holds.
    """
    _check_stage_count(profile, stage_count)
    stages, last = StageProfiles(profile), stage_count - 1
    per_parameter = device_bytes_per_parameter(staleness) + host_bytes_per_parameter(exact)

    def time(stage: int, start: int, end: int) -> float:
        ends = (stage == 0, stage == last)
        return cost(stages.stage(start, end, *ends), *ends)

    def memory(stage: int, start: int, end: int) -> float:
        cut = (start, end, stage == 0, stage == last)
        part = stages.stage(*cut)
        frozen_bytes = FROZEN_BYTES_PER_PARAMETER * part.frozen_parameters
        return per_parameter * part.parameters + frozen_bytes + stages.graphs_bytes(*cut)

    def fits(stage: int, start: int, end: int) -> bool:
        cut = (start, end, stage == 0, stage == last)
        return offer is None or offer.holds(stages.memory(cut, staleness, exact))

    lowest, _ = _minimise(profile, stage_count, time, fits)
    if math.isinf(lowest):
        raise CapacityError(
            f"no cut into {stage_count} stages has only stages that {offer} hold; use more stages, "
            "shorter sequences or a smaller model"
        )
    _, ends = _minimise(
        profile, stage_count, memory, lambda *cut: time(*cut) <= lowest and fits(*cut)
    )
    starts = (0, *ends[:-1])
    return tuple(
        StageRange(first_layer=start, end_layer=end)
        for start, end in zip(starts, ends, strict=True)
    )


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
