"""Moves of peers between stages during the run (design: placement and rebalancing).

The pipeline runs at its slowest stage, so a peer moves there from the stage that can spare it: the
one after whose loss both stages are best off. One move is often not enough (three stages tied for
the slowest need three), so a plan of moves is made as if they all happened at once, and its best
prefix is judged as a whole: its gain over the horizon, from the time at which it takes effect, must
exceed the cost of its downloads by a margin. Of that plan at most one move per stage is carried out
now, and the rest is planned anew in the next period.

Where no move helps the slowest stage, an exchange may: a faster peer comes, a slower one goes in
its place. It costs two downloads, and both peers must have room for both stages, so that neither
stage is without either of them in between.

Cost: sorting the peers, and for each planned move a pass over the stages and a few binary searches
(for an exchange, one for each peer of the slowest stage). Figures are in
docs/decisions/0014-rebalancing.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from swarm_shared.base.memory import StageMemory
from swarm_shared.base.text import size_text
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.scheduling.placement.loads import PeerLoad, StageLoad, stage_rates

PLANNED_MOVES_PER_STAGE = 4
"""Moves planned per stage of the run. More would be carried out so late that the fleet has changed
by then; fewer than one would miss what only helps when all tied stages are helped."""

MAX_PLANNED_MOVES = 256
"""Most moves of a plan, however many stages there are."""

MAX_TIES_COMPARED = 16
"""Equally fast peers that are compared by memory, bandwidth and download time."""

RATE_TOLERANCE = 1e-9
"""Relative difference of two rates up to which they count as equal; sums of the same rates in
another order differ by less."""


@dataclass(frozen=True, slots=True)
class MovePolicy:
    """The conditions of a move."""

    period_seconds: float = 60.0
    minimum_replicas: int = 1
    """Fewest peers that a stage is left with."""
    horizon_seconds: float = 1800.0
    """Time over which gains count: by then the fleet has changed, and another peer would have
    moved."""
    margin: float = 2.0
    """Factor of its cost that a plan must gain."""
    minimum_gain: float = 0.03
    """Smallest relative gain that is worth a move."""
    rate_noise: float = 0.03
    """Relative error of one peer's measured rate. The rate of a stage is known better, the more
    peers it has; a gain must exceed three times the error of the slowest stage."""
    longest_download_seconds: float = math.inf
    """Longest download of a stage's state for which a peer may move there."""


@dataclass(frozen=True, slots=True)
class Move:
    """One peer's move to another stage, with its reasons. Rates are in microbatches/s."""

    peer: PeerId
    source: StageIndex
    destination: StageIndex
    rate: float
    """Rate the peer adds to its destination."""
    source_rate: float
    """Rate of the source without the peer."""
    destination_rate: float
    """Present rate of the destination."""
    pipeline_rate: float
    """Present rate of the whole run."""
    planned_rate: float
    """Rate of the whole run once the plan that this move belongs to is carried out."""
    planned_moves: int
    state_bytes: int
    download_seconds: float
    payback_seconds: float
    """Time after its downloads in which the plan has gained what they cost."""
    release_first: bool
    """Whether the peer cannot hold both stages, so that it serves none while it downloads."""
    partner: PeerId | None = None
    """The peer that moves the opposite way in an exchange; both move or neither."""

    def sentence(self, name: str) -> str:
        """Explain the move to a person; `name` is the peer's."""
        gain = "from a standstill"
        if self.pipeline_rate > 0:
            gain = f"+{100 * (self.planned_rate / self.pipeline_rate - 1):.1f} %"
        others = self.planned_moves - 1
        together = f", together with {others} more move{'s' * (others > 1)}" if others else ""
        if self.partner is not None:
            together = f" (in exchange for …{self.partner[-8:]}){together}"
        meanwhile = "cannot go on" if self.release_first else "goes on"
        return (
            f"{name} moves from stage {self.source} to stage {self.destination}, which makes "
            f"{self.destination_rate:.3g} microbatches/s: it brings the run from "
            f"{self.pipeline_rate:.3g} to {self.planned_rate:.3g} ({gain}){together}; it downloads "
            f"{size_text(self.state_bytes)} in about {self.download_seconds:.0f} s, {meanwhile} "
            f"with its old stage meanwhile ({self.source_rate:.3g} microbatches/s without it), "
            f"and has paid for that {self.payback_seconds:.0f} s later"
        )


@dataclass(frozen=True, slots=True)
class MoveDecision:
    """The moves to carry out now, and why there are no more."""

    moves: tuple[Move, ...]
    reason: str
    """Why no (other) peer moves."""


@dataclass(frozen=True, slots=True)
class _PlannedMove:
    """One move of a plan, and the pipeline's rate after it."""

    peer: PeerLoad
    source: int
    destination: int
    rate_after: float
    back: PeerLoad | None = None
    """The peer that moves from the destination to the source in an exchange."""


def choose_moves(
    stages: Sequence[StageLoad],
    peers: Sequence[PeerLoad],
    policy: MovePolicy,
    resting: Collection[StageIndex] = (),
) -> MoveDecision:
    """Return the moves to begin now. `stages` are in order, and every stage has a peer.

    `resting` are stages that took part in a move within the last period: none of theirs begins now.
    A moving peer counts at its destination and cannot move again.
    """
    rates = stage_rates(stages, peers)
    now_rate = min(rates)
    steps = _plan(stages, peers, policy, list(rates))
    if not steps:
        return MoveDecision((), _why_no_plan(rates))
    chosen, planned_rate, payback = _best_prefix(stages, peers, policy, rates, steps)
    if not chosen:
        best = max(step.rate_after for step in steps)
        gain = 100 * (best / now_rate - 1) if now_rate else math.inf
        reason = (
            f"{len(steps)} move(s) could bring the pipeline from {now_rate:.3g} to {best:.3g} "
            f"microbatches/s (+{gain:.1f} %), which is not worth their downloads"
        )
        return MoveDecision((), reason)
    moves: list[Move] = []
    taken = {int(stage) for stage in resting}
    carried_out = 0
    for step in chosen:
        pair = {step.source, step.destination}
        begun = _moves_of(stages, rates, step, planned_rate, len(chosen), payback)
        if pair & taken or begun[0].source_rate + (begun[-1].rate if step.back else 0) <= now_rate:
            continue  # deferred until the moves before it have been made
        taken |= pair
        carried_out += 1
        moves.extend(begun)
    waiting = len(chosen) - carried_out
    reason = f"{waiting} more planned move(s) wait: one per stage and period" if waiting else ""
    return MoveDecision(tuple(moves), reason)


def _moves_of(
    stages: Sequence[StageLoad],
    rates: Sequence[float],
    step: _PlannedMove,
    planned_rate: float,
    planned_moves: int,
    payback_seconds: float,
) -> tuple[Move, ...]:
    """Return one step of a plan as moves, two for an exchange."""

    def move(peer: PeerLoad, source: int, destination: int, partner: PeerLoad | None) -> Move:
        origin, target = stages[source], stages[destination]
        return Move(
            peer=peer.peer,
            source=origin.stage,
            destination=target.stage,
            rate=peer.rate_at(target),
            source_rate=rates[source] - peer.rate_at(origin),
            destination_rate=rates[destination],
            pipeline_rate=min(rates),
            planned_rate=planned_rate,
            planned_moves=planned_moves,
            state_bytes=target.state_bytes,
            download_seconds=peer.download_seconds(target),
            payback_seconds=payback_seconds,
            release_first=_must_release_first(peer, origin, target),
            partner=None if partner is None else partner.peer,
        )

    moves = [move(step.peer, step.source, step.destination, step.back)]
    if step.back is not None:
        moves.append(move(step.back, step.destination, step.source, step.peer))
    return tuple(moves)


def _why_no_plan(rates: list[float]) -> str:
    slowest = _slowest(rates)
    return (
        f"stage {slowest} is the slowest at {rates[slowest]:.3g} microbatches/s, and no peer "
        "with enough memory and bandwidth can move there without making another stage as slow"
    )


def _slowest(rates: Sequence[float]) -> int:
    """Return the index of the stage that bounds the pipeline's rate."""
    return min(range(len(rates)), key=rates.__getitem__)


def _must_release_first(peer: PeerLoad, source: StageLoad, destination: StageLoad) -> bool:
    """Whether the peer has no room for both stages."""
    return not peer.memory.holds(source.memory + destination.memory)


# ---------------------------------------------------------------- the plan


def _plan(
    stages: Sequence[StageLoad],
    peers: Sequence[PeerLoad],
    policy: MovePolicy,
    rates: list[float],
) -> list[_PlannedMove]:
    """Plan moves to the slowest stage, again and again, until none of them improves it."""
    pools = _Pools(stages, peers)
    counts = [0] * len(stages)
    for peer in peers:
        counts[peer.stage] += 1
    steps: list[_PlannedMove] = []
    limit = max(len(stages), min(PLANNED_MOVES_PER_STAGE * len(stages), MAX_PLANNED_MOVES))
    while len(steps) < limit:
        slowest = _slowest(rates)
        choice = _best_move(stages, pools, rates, counts, slowest, policy)
        if choice is None:
            choice = _best_exchange(stages, pools, rates, slowest, policy)
        if choice is None:
            break
        source, peer, back = choice
        origin, target = stages[source], stages[slowest]
        rates[source] -= peer.rate_at(origin) - (back.rate_at(origin) if back is not None else 0.0)
        rates[slowest] += peer.rate_at(target) - (back.rate_at(target) if back is not None else 0.0)
        pools.take(source, peer)
        if back is None:
            counts[source] -= 1
            counts[slowest] += 1
        else:
            pools.take(slowest, back)
        steps.append(_PlannedMove(peer, source, slowest, min(rates), back))
    return steps


_Choice = tuple[int, PeerLoad, PeerLoad | None]
"""The source stage, the peer that moves, and the peer that goes to the source in exchange."""


def _best_move(
    stages: Sequence[StageLoad],
    pools: _Pools,
    rates: list[float],
    counts: list[int],
    slowest: int,
    policy: MovePolicy,
) -> _Choice | None:
    """Return the source and the peer whose move leaves the slower of the two stages best off."""
    target, low = stages[slowest], rates[slowest]
    min_bytes_per_second = target.state_bytes / policy.longest_download_seconds
    best: tuple[tuple[float, bool, float], int, PeerLoad] | None = None
    for bound, source, ideal in _sources(stages, rates, slowest):
        if best is not None and bound <= best[0][0]:
            break
        if counts[source] <= policy.minimum_replicas:
            continue
        origin = stages[source]
        for peer in pools.nearest(source, ideal, target.memory, min_bytes_per_second):
            level = min(low + peer.rate_at(target), rates[source] - peer.rate_at(origin))
            value = (
                level,
                not _must_release_first(peer, origin, target),
                -peer.download_seconds(target),
            )
            if level > low * (1 + RATE_TOLERANCE) and (best is None or value > best[0]):
                best = value, source, peer
    return None if best is None else (best[1], best[2], None)


def _best_exchange(
    stages: Sequence[StageLoad],
    pools: _Pools,
    rates: list[float],
    slowest: int,
    policy: MovePolicy,
) -> _Choice | None:
    """Return the pair of peers whose exchange leaves the slower of the two stages best off."""
    target, low = stages[slowest], rates[slowest]
    best: tuple[float, int, PeerLoad, PeerLoad] | None = None
    enough = low * (1 + max(RATE_TOLERANCE, policy.minimum_gain))
    for bound, source, ideal in _sources(stages, rates, slowest):
        if bound <= (enough if best is None else best[0]):
            break
        origin = stages[source]
        both = origin.memory + target.memory
        min_bytes_per_second = (
            max(origin.state_bytes, target.state_bytes) / policy.longest_download_seconds
        )
        for back in pools.members(slowest):
            if not back.memory.holds(both) or back.download_bytes_per_second < min_bytes_per_second:
                continue
            for peer in pools.nearest(
                source, back.speed_at(target) + ideal, both, min_bytes_per_second, compared=1
            ):
                level = min(
                    low + peer.rate_at(target) - back.rate_at(target),
                    rates[source] - peer.rate_at(origin) + back.rate_at(origin),
                )
                if level > (enough if best is None else best[0]):
                    best = level, source, peer, back
    return None if best is None else best[1:]


def _sources(
    stages: Sequence[StageLoad], rates: list[float], slowest: int
) -> list[tuple[float, int, float]]:
    """Return faster stages, best first: the rate both stages could reach, the source's index, and
    the speed that would have to move for that."""
    low, work = rates[slowest], stages[slowest].work_flops
    sources: list[tuple[float, int, float]] = []
    for source, stage in enumerate(stages):
        if rates[source] > low * (1 + RATE_TOLERANCE):
            source_work = stage.work_flops
            bound = (low * work + rates[source] * source_work) / (work + source_work)
            sources.append((bound, source, (rates[source] - low) / (1 / work + 1 / source_work)))
    return sorted(sources, key=lambda entry: (-entry[0], entry[1]))


class _Pools:
    """The peers that may move, per stage in the order of the speed they add to it."""

    def __init__(self, stages: Sequence[StageLoad], peers: Sequence[PeerLoad]) -> None:
        self._stages = stages
        self._peers: list[list[PeerLoad]] = [[] for _ in stages]
        for peer in peers:
            if peer.may_move and peer.flops_per_second > 0:
                self._peers[peer.stage].append(peer)
        for pool in self._peers:
            pool.sort(key=lambda peer: (peer.speed_at(stages[peer.stage]), peer.peer))
        self._speeds = [[p.speed_at(stages[p.stage]) for p in pool] for pool in self._peers]

    def take(self, stage: int, peer: PeerLoad) -> None:
        speeds, pool = self._speeds[stage], self._peers[stage]
        at = bisect_left(speeds, peer.speed_at(self._stages[stage]))
        while pool[at].peer != peer.peer:
            at += 1
        del speeds[at], pool[at]

    def members(self, stage: int) -> Sequence[PeerLoad]:
        return self._peers[stage]

    def nearest(
        self,
        stage: int,
        speed: float,
        memory: StageMemory,
        min_bytes_per_second: float,
        compared: int = MAX_TIES_COMPARED,
    ) -> Iterator[PeerLoad]:
        """Yield the fastest fitting peers below `speed` and the slowest fitting ones not below it.

        A fitting peer has `memory` and downloads at `min_bytes_per_second` or faster.
        """
        at = bisect_left(self._speeds[stage], speed)
        for places in (range(at - 1, -1, -1), range(at, len(self._speeds[stage]))):
            yield from self._equals(stage, places, memory, min_bytes_per_second, compared)

    def _equals(
        self,
        stage: int,
        places: range,
        memory: StageMemory,
        min_bytes_per_second: float,
        compared: int,
    ) -> Iterator[PeerLoad]:
        pool, speeds = self._peers[stage], self._speeds[stage]
        fitting: float | None = None
        yielded = 0
        for place in places:
            peer = pool[place]
            if fitting is not None and speeds[place] != fitting:
                return
            if peer.memory.holds(memory) and peer.download_bytes_per_second >= min_bytes_per_second:
                fitting = speeds[place]
                yielded += 1
                yield peer
                if yielded == compared:
                    return


# ---------------------------------------------------------------- whether it is worth it


def _best_prefix(
    stages: Sequence[StageLoad],
    peers: Sequence[PeerLoad],
    policy: MovePolicy,
    rates: Sequence[float],
    steps: Sequence[_PlannedMove],
) -> tuple[Sequence[_PlannedMove], float, float]:
    """Return the first moves of a plan that gain most beyond their cost, the pipeline's rate after
    them, and the seconds in which they are paid back. No moves if none are worth their cost."""
    counts = [0] * len(stages)
    for peer in peers:
        counts[peer.stage] += 1
    now_rate = min(rates)
    least_gain = max(policy.minimum_gain, 3 * policy.rate_noise * _error(stages, peers, rates))
    best: tuple[float, int, float, float] | None = None
    cost, longest, rounds = 0.0, 0.0, [0] * len(stages)
    for number, step in enumerate(steps, start=1):
        target = stages[step.destination]
        seconds = step.peer.download_seconds(target)
        # The state uses the uplinks of the stage's present peers. At worst one of them has
        # nothing left for microbatches during the download.
        cost += rates[step.destination] / max(1, counts[step.destination]) * seconds
        longest = max(longest, seconds)
        if step.back is not None:
            longest = max(longest, step.back.download_seconds(stages[step.source]))
        rounds[step.source] += 1
        rounds[step.destination] += 1
        delay = longest + policy.period_seconds * (max(rounds) - 1)
        gain = step.rate_after - now_rate
        if gain <= least_gain * now_rate:
            continue
        net = gain * (policy.horizon_seconds - delay) - policy.margin * cost
        if net > 0 and (best is None or net > best[0] * (1 + RATE_TOLERANCE)):
            best = net, number, step.rate_after, cost / gain
    if best is None:
        return (), now_rate, 0.0
    _, number, planned_rate, payback = best
    return steps[:number], planned_rate, payback


def _error(stages: Sequence[StageLoad], peers: Sequence[PeerLoad], rates: Sequence[float]) -> float:
    """Return the relative error of the slowest stage's rate if each of its peers' rates has the
    relative error 1."""
    slowest = _slowest(rates)
    speeds = [peer.rate_at(stages[slowest]) for peer in peers if peer.stage == slowest]
    total = math.fsum(speeds)
    return math.sqrt(math.fsum(speed * speed for speed in speeds)) / total if total > 0 else 0.0
