"""A mix of machines put to one model: who holds which stage, how fast it computes, and the bound.

Pure. The bound is what no pipeline over these machines and lines can beat: a stage's peers share
its microbatches as well as possible, each limited by its computing and by the bytes that it must
send and receive: an activation and a gradient per border, and its part of the all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.wan.mixes import Mix, Peer
from swarm_shared.base.errors import ConfigurationError
from swarm_shared.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Member:
    """One machine of the fleet, and its work."""

    name: str
    peer: Peer
    stage: int
    flops_per_second: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the model makes of compute and bytes."""

    work_flops: tuple[float, ...]
    """Of one microbatch in each stage, forward and backward."""
    border_bytes: int
    """Of one activation of a microbatch, and as many of a gradient."""
    gradient_bytes: tuple[int, ...]
    """All gradients of each stage, which its peers average."""
    microbatches: int
    """Of a step."""
    tokens_per_microbatch: int

    @property
    def stages(self) -> int:
        return len(self.work_flops)


@dataclass(frozen=True, slots=True)
class Bound:
    step_seconds: float
    tokens_per_second: float
    stage: int
    """The one that holds the others up."""


def sizes_of(manifest: Manifest, parameters: Sequence[int]) -> Sizes:
    """`parameters` of each stage, float32 as all is."""
    training, model = manifest.training, manifest.model
    numbers = training.sequences_per_microbatch * model.sequence_length * model.hidden_size
    return Sizes(
        work_flops=tuple(stage.work_flops for stage in manifest.stages),
        border_bytes=4 * numbers,
        gradient_bytes=tuple(4 * count for count in parameters),
        microbatches=training.microbatches_per_step,
        tokens_per_microbatch=manifest.tokens_per_microbatch,
    )


def assign(mix: Mix, stages: int, work_flops: Sequence[float], seconds: float) -> list[Member]:
    """Stages to machines: the fastest first, each to the stage whose peers are slowest together.

    All stages get as many machines. One of speed 1 takes `seconds` for one microbatch of a stage of
    mean work. ConfigurationError when the machines cannot be shared out equally.
    """
    places, left = divmod(len(mix.peers), stages)
    if left or not places:
        raise ConfigurationError(
            f"mix {mix.name!r} has {len(mix.peers)} machines; a multiple of {stages} is needed, so "
            "that every stage gets as many"
        )
    ordinary = sum(work_flops) / len(work_flops) / seconds
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
    """Sent by all machines together in a step: nobody gets along with less, uncompressed."""
    borders = 2 * sizes.border_bytes * (sizes.stages - 1) * sizes.microbatches
    averaged = 0
    for stage in range(sizes.stages):
        count = sum(member.stage == stage for member in members)
        averaged += 2 * (count - 1) * sizes.gradient_bytes[stage]
    return borders + averaged


def pipeline_bound(sizes: Sizes, members: Sequence[Member]) -> Bound:
    """The shortest step, without the time that a pipeline takes to fill, and without any delay."""
    slowest = max(range(sizes.stages), key=lambda stage: _stage_seconds(sizes, members, stage))
    seconds = _stage_seconds(sizes, members, slowest)
    tokens = sizes.microbatches * sizes.tokens_per_microbatch
    return Bound(seconds, tokens / seconds, slowest)


def compute_bound(sizes: Sizes, members: Sequence[Member]) -> float:
    """Tokens per second of the whole fleet's computing, if no byte had to be moved."""
    fleet = sum(member.flops_per_second for member in members)
    return fleet / sum(sizes.work_flops) * sizes.tokens_per_microbatch


def _stage_seconds(sizes: Sizes, members: Sequence[Member], stage: int) -> float:
    """The least time in which the stage's peers can do a step's microbatches: by bisection."""
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
    """Microbatches, and parts of them, that the peers of a stage can do in this time."""
    is_first, is_last = stage == 0, stage == sizes.stages - 1
    # Inputs come and their gradients go, outputs go and their gradients come.
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
