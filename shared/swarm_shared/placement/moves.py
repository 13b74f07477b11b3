"""Whom to move to another stage while the run goes on (design: placement and rebalancing).

The pipeline runs at its thinnest stage, so a peer moves there from the stage that can spare it,
the one whose going leaves both as well off as possible. One move is often not enough (three stages
tied for the thinnest need three), so a plan of moves is made as if they all happened at once, and
its best beginning is judged as a whole: what it adds over the horizon, from the time at which it
takes effect, must exceed what its downloads cost by a margin. Of that plan at most one move per
stage is carried out now, and the rest is planned anew in the next period.

What is not looked for: exchanges of two peers, which cost two downloads. Among stages of equal
work, which is what the planner cuts, moves alone come close to the optimum (the tests measure it).

Cost: sorting the peers, and for each move planned a pass over the stages and a few binary
searches. Figures are in docs/decisions/0014-rebalancing.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from swarm_shared.placement.loads import PeerLoad, StageLoad, stage_rates
from swarm_shared.types import PeerId, StageIndex

MOVES_AHEAD = 4
"""Moves planned per stage of the run. More would be carried out so late that the fleet has changed
by then; fewer than one would miss what only helps when all stages that tie are helped."""

EQUALS_COMPARED = 16
"""Of peers equally fast so many are compared by memory and download."""

NOISE = 1e-9
"""Relative; sums of the same rates in another order differ by less."""


@dataclass(frozen=True, slots=True)
class MovePolicy:
    """When a move is worth its while."""

    period_seconds: float = 60.0
    minimum_replicas: int = 1
    """A stage is never left with fewer peers than this."""
    horizon_seconds: float = 1800.0
    """Gains count for so long: by then the fleet has changed, and another peer would have moved."""
    margin: float = 2.0
    """So many times its cost must a plan gain."""
    minimum_gain: float = 0.005
    """Relative; less is not worth anybody's trouble."""
    rate_noise: float = 0.03
    """Relative error of one peer's measured rate. What a stage makes is known better, the more
    peers it has; a gain must exceed three times the error of the thinnest stage."""
    longest_download_seconds: float = math.inf
    """Whoever would need longer for a stage's state does not move there."""


@dataclass(frozen=True, slots=True)
class Move:
    """One peer's move to another stage, with what speaks for it. Rates in microbatches/s."""

    peer: PeerId
    source: StageIndex
    destination: StageIndex
    rate: float
    """What the peer adds to its destination."""
    source_rate: float
    """Of the source without it."""
    destination_rate: float
    """Of the destination as it is now."""
    pipeline_rate: float
    """Of the whole run as it is now."""
    planned_rate: float
    """Of the whole run when the plan that this move belongs to is carried out."""
    planned_moves: int
    state_bytes: int
    download_seconds: float
    payback_seconds: float
    """After its downloads the plan has earned what they cost within so long."""
    gap: bool
    """The peer cannot hold both stages, and serves none while it downloads."""

    def sentence(self, name: str) -> str:
        """For a person; `name` is the peer's."""
        gain = "from a standstill"
        if self.pipeline_rate > 0:
            gain = f"+{100 * (self.planned_rate / self.pipeline_rate - 1):.1f} %"
        others = self.planned_moves - 1
        together = f", together with {others} more move{'s' * (others > 1)}" if others else ""
        meanwhile = "cannot go on" if self.gap else "goes on"
        return (
            f"{name} moves from stage {self.source} to stage {self.destination}, which makes "
            f"{self.destination_rate:.3g} microbatches/s: it brings the run from "
            f"{self.pipeline_rate:.3g} to {self.planned_rate:.3g} ({gain}){together}; it downloads "
            f"{_size(self.state_bytes)} in about {self.download_seconds:.0f} s, {meanwhile} with "
            f"its old stage meanwhile ({self.source_rate:.3g} microbatches/s without it), and has "
            f"paid for that {self.payback_seconds:.0f} s later"
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done now, and why no more."""

    moves: tuple[Move, ...]
    pipeline_rate: float
    planned_rate: float
    reason: str
    """Why nobody (else) moves."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One move of a plan, and what the pipeline makes after it."""

    peer: PeerLoad
    source: int
    destination: int
    rate_after: float


def choose_moves(
    stages: Sequence[StageLoad],
    peers: Sequence[PeerLoad],
    policy: MovePolicy,
    resting: Collection[StageIndex] = (),
) -> Decision:
    """The moves to begin now. `stages` are in order, and every stage has a peer.

    `resting` are stages that have taken part in a move within the last period: no other one of
    theirs begins now. A peer on its way counts at its destination and cannot move again.
    """
    rates = stage_rates(stages, peers)
    now_rate = min(rates)
    steps = _plan(stages, peers, policy, list(rates))
    if not steps:
        return Decision((), now_rate, now_rate, _why_no_plan(rates))
    chosen, planned_rate, payback = _best_beginning(stages, peers, policy, rates, steps)
    if not chosen:
        best = max(step.rate_after for step in steps)
        gain = 100 * (best / now_rate - 1) if now_rate else math.inf
        reason = (
            f"{len(steps)} move(s) could bring the pipeline from {now_rate:.3g} to {best:.3g} "
            f"microbatches/s (+{gain:.1f} %), which is not worth their downloads"
        )
        return Decision((), now_rate, now_rate, reason)
    moves: list[Move] = []
    taken = {int(stage) for stage in resting}
    for step in chosen:
        source, there = step.source, stages[step.destination]
        source_rate = rates[source] - step.peer.rate_at(stages[source])
        if {source, step.destination} & taken or source_rate <= now_rate:
            continue  # its turn comes when the moves before it have been made
        taken |= {source, step.destination}
        moves.append(
            Move(
                peer=step.peer.peer,
                source=StageIndex(source),
                destination=there.stage,
                rate=step.peer.rate_at(there),
                source_rate=source_rate,
                destination_rate=rates[step.destination],
                pipeline_rate=now_rate,
                planned_rate=planned_rate,
                planned_moves=len(chosen),
                state_bytes=there.state_bytes,
                download_seconds=step.peer.download_seconds(there),
                payback_seconds=payback,
                gap=_gap(step.peer, stages[source], there),
            )
        )
    waiting = len(chosen) - len(moves)
    reason = f"{waiting} more planned move(s) wait: one per stage and period" if waiting else ""
    return Decision(tuple(moves), now_rate, planned_rate, reason)


def _why_no_plan(rates: list[float]) -> str:
    thinnest = min(range(len(rates)), key=rates.__getitem__)
    return (
        f"stage {thinnest} is the thinnest at {rates[thinnest]:.3g} microbatches/s, and nobody "
        "who fits it can go there without making another stage as thin"
    )


def _gap(peer: PeerLoad, source: StageLoad, destination: StageLoad) -> bool:
    return source.memory_bytes + destination.memory_bytes > peer.memory_bytes


# ---------------------------------------------------------------- the plan


def _plan(
    stages: Sequence[StageLoad],
    peers: Sequence[PeerLoad],
    policy: MovePolicy,
    rates: list[float],
) -> list[_Step]:
    """Moves to the thinnest stage, again and again, until none of them helps it."""
    pools = _Pools(stages, peers)
    counts = [0] * len(stages)
    for peer in peers:
        counts[peer.stage] += 1
    steps: list[_Step] = []
    while len(steps) < MOVES_AHEAD * len(stages):
        thinnest = min(range(len(stages)), key=rates.__getitem__)
        found = _best_move(stages, pools, rates, counts, thinnest, policy)
        if found is None:
            break
        source, peer = found
        pools.take(source, peer)
        counts[source] -= 1
        counts[thinnest] += 1
        rates[source] -= peer.rate_at(stages[source])
        rates[thinnest] += peer.rate_at(stages[thinnest])
        steps.append(_Step(peer, source, thinnest, min(rates)))
    return steps


def _best_move(
    stages: Sequence[StageLoad],
    pools: _Pools,
    rates: list[float],
    counts: list[int],
    thinnest: int,
    policy: MovePolicy,
) -> tuple[int, PeerLoad] | None:
    """The source and the peer whose move leaves the thinner of the two stages best off."""
    there = stages[thinnest]
    low, work = rates[thinnest], there.work_flops
    slowest_line = there.state_bytes / policy.longest_download_seconds

    def bound(source: int) -> float:
        """What a peer of exactly the right speed would leave both stages with."""
        other = stages[source].work_flops
        return (low * work + rates[source] * other) / (work + other)

    sources = [
        (bound(source), source)
        for source in range(len(stages))
        if source != thinnest
        and counts[source] > policy.minimum_replicas
        and rates[source] > low * (1 + NOISE)
    ]
    best: tuple[tuple[float, bool, float], int, PeerLoad] | None = None
    for limit, source in sorted(sources, key=lambda entry: (-entry[0], entry[1])):
        if best is not None and limit <= best[0][0]:
            break
        here = stages[source]
        ideal = (rates[source] - low) / (1 / work + 1 / here.work_flops)
        for peer in pools.nearest(source, ideal, there.memory_bytes, slowest_line):
            level = min(low + peer.rate_at(there), rates[source] - peer.rate_at(here))
            value = (level, not _gap(peer, here, there), -peer.download_seconds(there))
            if level > low * (1 + NOISE) and (best is None or value > best[0]):
                best = value, source, peer
    return None if best is None else best[1:]


class _Pools:
    """The peers that may move, of each stage by speed."""

    def __init__(self, stages: Sequence[StageLoad], peers: Sequence[PeerLoad]) -> None:
        self._peers: list[list[PeerLoad]] = [[] for _ in stages]
        for peer in peers:
            if peer.may_move and peer.flops_per_second > 0:
                self._peers[peer.stage].append(peer)
        for pool in self._peers:
            pool.sort(key=lambda peer: (peer.flops_per_second, peer.peer))
        self._speeds = [[peer.flops_per_second for peer in pool] for pool in self._peers]

    def take(self, stage: int, peer: PeerLoad) -> None:
        speeds, pool = self._speeds[stage], self._peers[stage]
        at = bisect_left(speeds, peer.flops_per_second)
        while pool[at].peer != peer.peer:
            at += 1
        del speeds[at], pool[at]

    def nearest(
        self, stage: int, speed: float, memory_bytes: int, line: float
    ) -> Iterator[PeerLoad]:
        """Of those that can go, the fastest ones below `speed` and the slowest ones not below it.

        They have the memory and download at least at `line` bytes per second.
        """
        at = bisect_left(self._speeds[stage], speed)
        for places in (range(at - 1, -1, -1), range(at, len(self._speeds[stage]))):
            yield from self._equals(stage, places, memory_bytes, line)

    def _equals(
        self, stage: int, places: range, memory_bytes: int, line: float
    ) -> Iterator[PeerLoad]:
        pool = self._peers[stage]
        fitting: float | None = None
        found = 0
        for place in places:
            peer = pool[place]
            if fitting is not None and peer.flops_per_second != fitting:
                return
            if peer.memory_bytes >= memory_bytes and peer.download_bytes_per_second >= line:
                fitting = peer.flops_per_second
                found += 1
                yield peer
                if found == EQUALS_COMPARED:
                    return


# ---------------------------------------------------------------- whether it is worth it


def _best_beginning(
    stages: Sequence[StageLoad],
    peers: Sequence[PeerLoad],
    policy: MovePolicy,
    rates: Sequence[float],
    steps: Sequence[_Step],
) -> tuple[Sequence[_Step], float, float]:
    """The first moves of a plan that gain most beyond their cost; none if nothing is worth it.

    With them the pipeline's rate after them, and the seconds in which they are paid back.
    """
    counts = [0] * len(stages)
    for peer in peers:
        counts[peer.stage] += 1
    now_rate = min(rates)
    least_gain = max(policy.minimum_gain, 3 * policy.rate_noise * _error(peers, rates))
    best: tuple[float, int, float, float] | None = None
    cost, longest, rounds = 0.0, 0.0, [0] * len(stages)
    for number, step in enumerate(steps, start=1):
        there = stages[step.destination]
        seconds = step.peer.download_seconds(there)
        # The state comes out of the uplinks of those who serve that stage now. At worst one of
        # them has nothing left for microbatches meanwhile.
        cost += rates[step.destination] / max(1, counts[step.destination]) * seconds
        longest = max(longest, seconds)
        rounds[step.source] += 1
        rounds[step.destination] += 1
        delay = longest + policy.period_seconds * (max(rounds) - 1)
        gain = step.rate_after - now_rate
        if gain <= least_gain * now_rate:
            continue
        net = gain * (policy.horizon_seconds - delay) - policy.margin * cost
        if net > 0 and (best is None or net > best[0] * (1 + NOISE)):
            best = net, number, step.rate_after, cost / gain
    if best is None:
        return (), now_rate, 0.0
    _, number, planned_rate, payback = best
    return steps[:number], planned_rate, payback


def _error(peers: Sequence[PeerLoad], rates: Sequence[float]) -> float:
    """Relative error of the thinnest stage's rate, when that of each of its peers' is 1."""
    thinnest = min(range(len(rates)), key=rates.__getitem__)
    speeds = [peer.flops_per_second for peer in peers if peer.stage == thinnest]
    total = math.fsum(speeds)
    return math.sqrt(math.fsum(speed * speed for speed in speeds)) / total if total > 0 else 0.0


def _size(count_bytes: int) -> str:
    return f"{count_bytes / 1e9:.2f} GB" if count_bytes >= 1e8 else f"{count_bytes / 1e6:.1f} MB"
