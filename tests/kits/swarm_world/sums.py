"""Checks of sums in the simulated world: digests of the gradients that are sums of cells.

A gradient is a vector with one element per cell, and one per cell for what a liar adds; the members
of an all-reduce cut it into slices of the same length. Digests are the ones that ship.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from swarm_coordinator.core import events
from swarm_shared.base.types import CHECKS_PER_SECRET, PeerId, RunId
from swarm_shared.identity import norm_sketch
from swarm_shared.identity.linear_digest import MODULUS, DigestKey, check_seed, to_text
from swarm_shared.identity.norm_sketch import Sketcher, SketchKey, vector_key
from swarm_shared.identity.work_statements import SumDigests, SumStatement
from swarm_shared.protocol import Audit, Close, Reduction, SumCheck, SumsChecked

if TYPE_CHECKING:
    from kits.swarm_world.peer import SimPeer
    from kits.swarm_world.worker import SimWorker
    from kits.swarm_world.world import World

Gradient = Counter[tuple[int, int]]

LARGE_GRADIENT = 1000
"""How many times as large a gradient is of which `Options.large_gradients` says so."""


class SumLie(StrEnum):
    """What a peer does to the averages that it is part of."""

    NONE = ""
    CHANGES_SUM = "changes the sum of its slice, for all members"
    CHANGES_SUM_AND_RECEIVED = "the same, and states that it received it from another member"
    EQUIVOCATES = "sends a changed sum of its slice to one member"
    STATES_OTHER_PART = "puts in what it has, and states something else for one slice"
    STATES_OTHER_RESULT = "states that it took out something else"
    STATES_NO_SUM = "its slices do not add up to its totals"
    ADDS = "puts in more than what it counts, and states that it put it in"
    WATCHES = "the same, unless auditors have asked it for the inputs of all that counts"
    LEAVES = "the same, and leaves as soon as an attempt to close is aborted"
    FALSE_AUDITS = "states other digests of what it audits"
    FORGES = "changes the sum of its slice so that digests stay, if an order to audit has a secret"
    IDLE_ADDS = "puts something in although nothing of it counts"
    OUTSIZED = "puts in much more than what it counts, and states that it put it in"
    OUTSIZED_LEAVES = "the same, and leaves as soon as an attempt to close is aborted"
    HIDES_SIZE = "puts in much more, and states the sketch of less"
    STATES_OTHER_SKETCH = "states another sketch of what it took out"


LEAVING = (SumLie.LEAVES, SumLie.OUTSIZED_LEAVES)
"""Lies of peers that leave once they are doubted."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """An all-reduce that is over, at one member."""

    members: tuple[PeerId, ...]
    parts: Mapping[PeerId, Gradient]
    """What each member put in."""
    total: Gradient
    """What the member took out."""


def _cells(world: World) -> list[tuple[int, int]]:
    """The cell of each element of a vector."""
    options = world.options
    true = [(s, m) for s in range(options.stages) for m in range(options.microbatches)]
    return true + [(s, -1 - m) for s, m in true]


def _bounds(world: World, size: int) -> list[tuple[int, int]]:
    """The slices of a vector among so many members."""
    elements = len(_cells(world))
    cuts = [elements * place // size for place in range(size + 1)]
    return list(itertools.pairwise(cuts))


def changed(
    world: World, members: tuple[PeerId, ...], reducer: PeerId, total: Gradient
) -> Gradient:
    """The sum with one more in the slice of a reducer."""
    start, stop = _bounds(world, len(members))[members.index(reducer)]
    return total + Counter([_cells(world)[start]]) if stop > start else total


def forged(world: World, members: tuple[PeerId, ...], reducer: PeerId, total: Gradient) -> Gradient:
    """The sum with a change in the slice of a reducer that has no digest under the first seed of
    a secret which it knows as an auditor."""
    start, stop = _bounds(world, len(members))[members.index(reducer)]
    secret = world.peers[reducer].known_secret
    if not secret or stop - start < 2:
        return total
    world.counts["forged sums"] += 1
    key, cells = DigestKey(check_seed(secret, 0), "own"), _cells(world)
    one = np.ones(1, np.int64)
    weights = [key.digest(one, place) for place in (start, start + 1)]
    changed = Counter(total)
    changed[cells[start]] += _signed(weights[1])
    changed[cells[start + 1]] -= _signed(weights[0])
    return changed


def _signed(word: int) -> int:
    return word - MODULUS if word >= MODULUS // 2 else word


def taken_out(world: World, members: tuple[PeerId, ...], total: Gradient, by: PeerId) -> Gradient:
    """What a member takes out of an all-reduce in which reducers may lie."""
    for reducer in members:
        lie = world.peers[reducer].sum_lie
        first = next((m for m in members if m != reducer), reducer)
        if lie in (SumLie.CHANGES_SUM, SumLie.CHANGES_SUM_AND_RECEIVED) or (
            lie is SumLie.EQUIVOCATES and by == first
        ):
            total = changed(world, members, reducer, total)
        elif lie is SumLie.FORGES:
            total = forged(world, members, reducer, total)
    return total


def put_in(peer: SimPeer, own: Gradient) -> Gradient:
    """What a member puts into an all-reduce."""
    lies = _ADDS if own else {SumLie.IDLE_ADDS: 1}
    if peer.sum_lie not in lies or (peer.sum_lie is SumLie.WATCHES and _sees_all(peer, own)):
        return own
    peer.world.counts["added"] += 1
    return own + Counter({(0, -1): lies[peer.sum_lie]})


_ADDS = {
    SumLie.ADDS: 1,
    SumLie.WATCHES: 1,
    SumLie.LEAVES: 1,
    SumLie.OUTSIZED: 1000,
    SumLie.OUTSIZED_LEAVES: 1000,
    SumLie.HIDES_SIZE: 1000,
}
"""How much is added by each lie."""


def _sees_all(peer: SimPeer, own: Gradient) -> bool:
    """Whether auditors have asked a peer for the inputs of all that counts."""
    assert peer.holding is not None
    step = peer.holding.account.step
    return all((step, microbatch) in peer.shown for _, microbatch in own)


def of_cell(peer: SimPeer, order: Audit) -> dict[str, tuple[tuple[str, ...], ...]]:
    """What an auditor states of a cell: digests and sketches of its own part and, at tied ends, of
    the tied one."""
    assert order.secret is not None
    peer.known_secret = order.secret
    gradient = Counter([(int(order.stage), int(order.microbatch))])
    if peer.sum_lie is SumLie.FALSE_AUDITS:
        gradient[0, -1] += 1
    seeds = [check_seed(order.secret, number) for number in range(CHECKS_PER_SECRET)]
    last = peer.world.options.stages - 1
    tied = peer.world.options.tied and last > 0 and order.stage in (0, last)
    counts = _counts(peer.world, gradient, (0, len(_cells(peer.world))))
    parts = ("own", "tied") if tied else ("own",)
    return {
        "sums": tuple(
            tuple(_digest(DigestKey(seed, part), counts, 0) for seed in seeds) for part in parts
        ),
        "sketches": tuple(
            tuple(norm_sketch.to_text(Sketcher(seed, part).sketch(counts)) for seed in seeds)
            for part in parts
        ),
    }


def _counts(world: World, gradient: Gradient, bound: tuple[int, int]) -> NDArray[np.int64]:
    """The elements of a vector between these bounds."""
    large = world.options.large_gradients
    return np.array(
        [
            gradient[stage, number] * (LARGE_GRADIENT if 0 <= number < large else 1)
            for stage, number in _cells(world)[slice(*bound)]
        ],
        np.int64,
    )


def _digest(key: DigestKey | SketchKey, counts: NDArray[np.int64], start: int) -> str:
    return to_text(key.digests((counts,), start)[0])


def state(worker: SimWorker, order: SumCheck, close: Close) -> SumsChecked | None:
    """The peer's statement of an averaged attempt; signing is left out. None for one that is gone,
    because the stage was given up meanwhile."""
    peer, world = worker.peer, worker.peer.world
    lanes = [(worker, close.reductions)]
    if close.moving and peer.prepared is not None:
        lanes.append((peer.prepared.worker, close.moving))
    at = (order.step, order.attempt)
    if len(lanes) != 1 + bool(close.moving) or any(lane.averaged != at for lane, _ in lanes):
        world.counts["sums gone"] += 1
        return None
    checks = [_digests(lane, one, order) for lane, reductions in lanes for one in reductions]
    world.counts["sums stated"] += 1
    world.counts["slices stated"] += order.details
    statement = SumStatement(
        run=RunId("run"), generation=peer.generation, step=order.step, attempt=order.attempt,
        stage=worker.stage, peer=peer.id, seed=order.seed, weights=order.weights,
        checks=tuple(checks),
    )  # fmt: skip
    envelope = f"signed by {peer.id}, number {len(world.statements)}"
    world.statements[envelope] = statement
    return SumsChecked(
        step=order.step, attempt=order.attempt, details=order.details, statement=envelope
    )


def send(peer: SimPeer, message: SumsChecked) -> None:
    statement = peer.world.statements[message.statement]
    peer.deliver(
        lambda session, name: events.SumsStated(
            session, name, message.attempt, message.details, statement, message.statement
        )
    )


def _digests(worker: SimWorker, reduction: Reduction, order: SumCheck) -> SumDigests:
    peer, world = worker.peer, worker.peer.world
    key = vector_key(order.seed, reduction.part, order.weights)
    exchange = worker.exchanges[reduction.part]
    bounds = _bounds(world, len(exchange.members))
    place = exchange.members.index(peer.id)
    others = [member for member in exchange.members if member != peer.id]
    lie = peer.sum_lie if others else SumLie.NONE
    part, result = exchange.parts[peer.id], exchange.total
    received = dict(exchange.parts)
    if lie is SumLie.STATES_OTHER_PART:
        part = changed(world, exchange.members, others[0], part)
    elif lie is SumLie.STATES_OTHER_RESULT:
        result = changed(world, exchange.members, others[0], result)
    elif lie is SumLie.CHANGES_SUM_AND_RECEIVED:
        received[others[0]] = changed(world, exchange.members, peer.id, received[others[0]])

    whole = (0, len(_cells(world)))

    def of(gradient: Gradient, bound: tuple[int, int]) -> str:
        return _digest(key, _counts(world, gradient, bound), bound[0])

    def sketch(gradient: Gradient) -> str:
        counts = _counts(world, gradient, whole)
        return norm_sketch.to_text(Sketcher(order.seed, reduction.part).sketch(counts))

    stated_part = (
        changed(world, exchange.members, others[0], part) if (lie is SumLie.STATES_NO_SUM) else part
    )
    sketched_part, sketched_result = stated_part, result
    if lie is SumLie.HIDES_SIZE:
        sketched_part = Counter({cell: n for cell, n in part.items() if cell[1] >= 0})
    elif lie is SumLie.STATES_OTHER_SKETCH:
        sketched_result = changed(world, exchange.members, others[0], result)
    if not order.details:
        return SumDigests(
            part=of(stated_part, whole), result=of(result, whole),
            part_sketch=sketch(sketched_part), result_sketch=sketch(sketched_result),
        )  # fmt: skip
    if order.weights is not None:
        # What follows from a sketch that was stated is stated of the slices, too.
        stated_part = part = sketched_part
        result = sketched_result
    return SumDigests(
        part=of(stated_part, whole), result=of(result, whole),
        parts=tuple(of(part, bound) for bound in bounds),
        results=tuple(of(result, bound) for bound in bounds),
        received=tuple(of(received[m], bounds[place]) for m in exchange.members),
    )  # fmt: skip
