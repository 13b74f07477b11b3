"""Assignment of a mix of machines to a model's stages, their pace, and the bound. Pure.

No pipeline over these machines and links exceeds the bound: a stage's peers share its microbatches
optimally, each limited by its compute and by the bytes that it must send and receive, an
activation and a gradient per boundary and its part of the all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.wan.mixes import Mix, Peer
from swarm_shared.base.errors import ConfigurationError
from swarm_shared.run.manifest import Manifest
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes


@dataclass(frozen=True, slots=True)
class Member:
    """One machine of the fleet and its stage."""

    name: str
    peer: Peer
    stage: int
    flops_per_second: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """Compute and bytes of the model."""

    work_flops: tuple[float, ...]
    """FLOPs of one microbatch in each stage, forward and backward."""
    border_bytes: int
    """Bytes of one microbatch's activation, and of its gradient."""
    gradient_bytes: tuple[int, ...]
    """Bytes of all gradients of each stage, which its peers average."""
    microbatches: int
    """Number per step."""
    tokens_per_microbatch: int

    @property
    def stages(self) -> int:
        return len(self.work_flops)

    @property
    def sent_bytes(self) -> int:
        """Bytes of one microbatch that a stage sends over its boundaries: an inner stage an
        activation and a gradient, one of two stages either."""
        return self.border_bytes * min(2, self.stages - 1)


@dataclass(frozen=True, slots=True)
class Bound:
    step_seconds: float
    tokens_per_second: float
    stage: int
    """Index of the bottleneck stage."""


def sizes_of(manifest: Manifest) -> Sizes:
    """Return the sizes of a run, all in float32."""
    training, model = manifest.training, manifest.model
    numbers = training.sequences_per_microbatch * model.sequence_length * model.hidden_size
    return Sizes(
        work_flops=tuple(stage.work_flops for stage in manifest.stages),
        border_bytes=4 * numbers,
        gradient_bytes=tuple(one.gradient_bytes for one in stage_sizes(manifest)),
        microbatches=training.microbatches_per_step,
        tokens_per_microbatch=manifest.tokens_per_microbatch,
    )


def assign(mix: Mix, work_flops: Sequence[float]) -> list[Member]:
    """Assign machines to stages: the fastest first, each to the stage with the lowest total rate.

    All stages get equally many machines. One of speed 1 takes the mix's `microbatch_seconds` for
    one microbatch of a stage of mean work. Raises ConfigurationError when the machines cannot be
    divided equally.
    """
    stages = mix.training.stages
    places, left = divmod(len(mix.peers), stages)
    if left or not places:
        raise ConfigurationError(
            f"mix {mix.name!r} has {len(mix.peers)} machines; stages of equal size need a multiple "
            f"of {stages}"
        )
    ordinary = sum(work_flops) / len(work_flops) / mix.training.microbatch_seconds
    rates, taken = [0.0] * stages, [0] * stages
    members: list[Member] = []
    order = sorted(range(len(mix.peers)), key=lambda index: (-mix.peers[index].speed, index))
    for index in order:
        peer = mix.peers[index]
        free = [one for one in range(stages) if taken[one] < places]
        stage = min(free, key=lambda one: (rates[one], one))
        taken[stage] += 1
        flops = peer.speed * ordinary
        rates[stage] += flops / work_flops[stage]
        members.append(Member(f"peer-{index + 1}", peer, stage, flops))
    return members


def minimum_bytes(sizes: Sizes, members: Sequence[Member]) -> int:
    """Return the minimum bytes that all machines send in a step, uncompressed."""
    borders = 2 * sizes.border_bytes * (sizes.stages - 1) * sizes.microbatches
    averaged = 0
    for stage in range(sizes.stages):
        count = sum(member.stage == stage for member in members)
        averaged += 2 * (count - 1) * sizes.gradient_bytes[stage]
    return borders + averaged


def pipeline_bound(sizes: Sizes, members: Sequence[Member]) -> Bound:
    """Return the bound of a step, without pipeline fill and delays."""
    slowest = max(range(sizes.stages), key=lambda stage: _stage_seconds(sizes, members, stage))
    seconds = _stage_seconds(sizes, members, slowest)
    tokens = sizes.microbatches * sizes.tokens_per_microbatch
    return Bound(seconds, tokens / seconds, slowest)


def compute_bound(sizes: Sizes, members: Sequence[Member]) -> float:
    """Return the fleet's tokens per second if no byte had to be moved."""
    fleet = sum(member.flops_per_second for member in members)
    return fleet / sum(sizes.work_flops) * sizes.tokens_per_microbatch


def _stage_seconds(sizes: Sizes, members: Sequence[Member], stage: int) -> float:
    """Return the minimum time of a step's microbatches at the stage's peers, by bisection."""
    peers = [member for member in members if member.stage == stage]
    low, high = 0.0, 1.0
    while _done(sizes, peers, stage, high) < sizes.microbatches:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if _done(sizes, peers, stage, middle) < sizes.microbatches:
            low = middle
        else:
            high = middle
    return high


def _done(sizes: Sizes, peers: Sequence[Member], stage: int, seconds: float) -> float:
    """Return the microbatches, including fractions, that a stage's peers can do in `seconds`."""
    is_first, is_last = stage == 0, stage == sizes.stages - 1
    # Inputs are received and their gradients sent; outputs are sent, their gradients received.
    each_way = sizes.border_bytes * (2 - is_first - is_last)
    averaged = 2 * (len(peers) - 1) / len(peers) * sizes.gradient_bytes[stage]
    total = 0.0
    for member in peers:
        link = member.peer.link
        share = seconds * member.flops_per_second / sizes.work_flops[stage]
        for rate in (link.up_bytes_per_second, link.down_bytes_per_second):
            left = seconds * rate - averaged
            if each_way:
                share = min(share, max(0.0, left) / each_way)
            elif left < 0:
                share = 0.0
        total += share
    return total
