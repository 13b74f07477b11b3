"""Who moves where: never to the run's harm, only when it pays, and close to the best there is."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.memory import offers, takes
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.scheduling.placement import (
    MoveDecision,
    MovePolicy,
    PeerLoad,
    StageLoad,
    choose_moves,
    stage_rates,
)
from swarm_shared.scheduling.placement.moves import RATE_TOLERANCE

FREE = MovePolicy(minimum_gain=0.0, rate_noise=0.0, margin=0.0)
"""Whatever helps is worth it."""


def stage(index: int, work: float = 1.0, memory: int = 10, state: int = 1) -> StageLoad:
    return StageLoad(StageIndex(index), work, takes(memory), state)


def peer(name: str, at: int, speed: float = 1.0, memory: int = 100, down: float = 1.0) -> PeerLoad:
    return PeerLoad(PeerId(name), StageIndex(at), speed, offers(memory), down)


def fleet(*counts: int, speed: float = 1.0) -> list[PeerLoad]:
    """Like peers: so many at each stage."""
    return [
        peer(f"{at}-{number}", at, speed)
        for at, count in enumerate(counts)
        for number in range(count)
    ]


def after(peers: list[PeerLoad], decision: MoveDecision) -> list[PeerLoad]:
    there = {move.peer: move.destination for move in decision.moves}
    return [replace(p, stage=there.get(p.peer, p.stage)) for p in peers]


def settle(
    stages: list[StageLoad], peers: list[PeerLoad], policy: MovePolicy = FREE
) -> list[PeerLoad]:
    """Period after period until nobody moves any more."""
    for _ in range(1000):
        decision = choose_moves(stages, peers, policy)
        if not decision.moves:
            return peers
        peers = after(peers, decision)
    raise AssertionError("they never come to rest")


def optimum(stages: list[StageLoad], peers: list[PeerLoad]) -> float:
    """The best pipeline rate over all ways to spread the peers, by trying all of them."""
    best = 0.0
    for places in itertools.product(range(len(stages)), repeat=len(peers)):
        spread = [replace(p, stage=StageIndex(at)) for p, at in zip(peers, places, strict=True)]
        fits = all(p.memory.holds(stages[p.stage].memory) for p in spread)
        if fits and all(s in places for s in range(len(stages))):
            best = max(best, min(stage_rates(stages, spread)))
    return best


# ---------------------------------------------------------------- one rule each


def test_a_peer_goes_from_the_richest_stage_to_the_thinnest() -> None:
    decision = choose_moves([stage(0), stage(1), stage(2)], fleet(2, 6, 4), FREE)
    (move,) = decision.moves
    assert (move.source, move.destination) == (1, 0)
    assert (move.pipeline_rate, move.planned_rate) == (2.0, 4.0)
    assert move.planned_moves == 2
    assert "wait" in decision.reason


def test_a_balanced_run_is_left_alone() -> None:
    decision = choose_moves([stage(0), stage(1)], fleet(3, 4), FREE)
    assert decision.moves == ()
    assert "slowest" in decision.reason


def test_stages_that_tie_for_the_thinnest_are_helped_one_after_the_other() -> None:
    # The first move alone raises nothing: there are two others as thin.
    stages = [stage(i) for i in range(4)]
    peers = fleet(2, 2, 2, 10)
    for _ in range(3):
        decision = choose_moves(stages, peers, replace(FREE, minimum_gain=0.01))
        assert len(decision.moves) == 1
        peers = after(peers, decision)
    assert min(stage_rates(stages, peers)) == 3.0


def test_the_peer_whose_speed_fits_the_difference_moves() -> None:
    peers = [peer("slow", 0, 1.0), peer("fit", 0, 3.0), peer("fast", 0, 9.0), peer("there", 1, 6.0)]
    (move,) = choose_moves([stage(0), stage(1)], peers, FREE).moves
    assert move.peer == "fit"
    assert move.planned_rate == 9.0


def test_work_counts_a_stage_of_half_the_work_needs_half_the_peers() -> None:
    peers = settle([stage(0, work=2.0), stage(1, work=1.0)], fleet(1, 8))
    assert sum(p.stage == 0 for p in peers) == 6


def test_where_no_move_helps_a_faster_peer_changes_places_with_a_slower_one() -> None:
    stages = [stage(0, work=1.0), stage(1, work=10.0)]
    peers = [peer("fast", 0, 20.0), peer("slow", 1, 10.0)]
    first, second = choose_moves(stages, peers, FREE).moves
    assert (first.peer, first.destination, first.partner) == ("fast", 1, "slow")
    assert (second.peer, second.destination, second.partner) == ("slow", 0, "fast")
    assert first.planned_rate == 2.0
    assert "in exchange for …slow" in first.sentence("x")


def test_among_equals_who_can_hold_both_stages_goes_and_then_who_downloads_faster() -> None:
    stages = [stage(0, memory=10), stage(1, memory=10)]
    peers = [
        peer("tight", 0, memory=10, down=9.0), peer("slow line", 0, memory=20, down=1.0),
        peer("fast line", 0, memory=20, down=5.0), peer("there", 1),
    ]  # fmt: skip
    (move,) = choose_moves(stages, peers, FREE).moves
    assert move.peer == "fast line"
    assert not move.release_first


def test_a_stage_keeps_its_minimum_of_replicas() -> None:
    peers = fleet(3, 1)
    assert choose_moves([stage(0), stage(1)], peers, replace(FREE, minimum_replicas=3)).moves == ()
    assert choose_moves([stage(0), stage(1)], peers, replace(FREE, minimum_replicas=2)).moves


def test_a_download_that_costs_more_than_the_move_gains_is_not_made() -> None:
    policy = MovePolicy(horizon_seconds=1000.0)
    cheap, dear = stage(1, state=100), stage(1, state=900)
    assert choose_moves([stage(0), cheap], fleet(5, 3), policy).moves
    decision = choose_moves([stage(0), dear], fleet(7, 3), policy)
    assert decision.moves == ()
    assert decision.reason == (
        "2 move(s) could bring the pipeline from 3 to 5 microbatches/s (+66.7 %), which is not "
        "worth their downloads"
    )


def test_a_gain_that_is_too_small_is_not_made() -> None:
    stages, peers = [stage(0), stage(1)], fleet(100, 98)
    assert choose_moves(stages, peers, replace(FREE, minimum_gain=0.02)).moves == ()
    assert choose_moves(stages, peers, replace(FREE, minimum_gain=0.001)).moves


def test_a_gain_within_the_error_of_measured_rates_is_not_made() -> None:
    # The thinnest stage has 98 like peers: its rate is known ten times better than one of theirs.
    stages, peers = [stage(0), stage(1)], fleet(100, 98)
    assert choose_moves(stages, peers, replace(FREE, rate_noise=0.04)).moves == ()
    assert choose_moves(stages, peers, replace(FREE, rate_noise=0.02)).moves
    # One peer alone is known no better than it is itself, however many the other stage has.
    alone = [peer("alone", 1, 96.0), *fleet(100)]
    assert choose_moves(stages, alone, replace(FREE, rate_noise=0.01)).moves == ()
    assert choose_moves(stages, alone, replace(FREE, rate_noise=0.005)).moves


def test_rates_that_flicker_do_not_send_a_peer_to_and_fro() -> None:
    stages = [stage(0, state=100), stage(1, state=100)]
    moves = 0
    peers = [*fleet(4, 4), peer("small", 0, 0.1)]
    for period in range(20):
        flicker = 1.02 if period % 2 else 1.0
        seen = [
            replace(p, flops_per_second=p.flops_per_second * (flicker if p.stage == 0 else 1.0))
            for p in peers
        ]
        decision = choose_moves(stages, seen, MovePolicy())
        moves += len(decision.moves)
        peers = after(peers, decision)
    assert moves == 0


def test_a_decision_says_why_who_gains_what_for_how_much() -> None:
    stages = [stage(0, memory=60), stage(1, memory=60, state=2 * 10**9)]
    peers = [replace(p, download_bytes_per_second=1e8) for p in fleet(6, 2)]
    (move,) = choose_moves(stages, peers, MovePolicy()).moves
    assert move.sentence("bert") == (
        "bert moves from stage 0 to stage 1, which makes 2 microbatches/s: it brings the run from "
        "2 to 4 (+100.0 %), together with 1 more move; it downloads 2 GB in about 20 s, cannot "
        "go on with its old stage meanwhile (5 microbatches/s without it), and has paid for that "
        "20 s later"
    )


@pytest.mark.parametrize(
    ("there", "now", "gain", "paid"), [(1, "0.5", "+100.0 %", 20), (0, "0", "from a standstill", 0)]
)
def test_the_decision_of_a_move_alone_names_no_other_and_that_its_old_stage_is_served_meanwhile(
    there: int, now: str, gain: str, paid: int
) -> None:
    stages = [stage(0), stage(1, state=2 * 10**9)]
    peers = [replace(p, download_bytes_per_second=1e8) for p in fleet(2 + there, there, speed=0.5)]
    (move,) = choose_moves(stages, peers, MovePolicy()).moves
    rate = "1" if there else "0.5"
    assert move.sentence("bert") == (
        f"bert moves from stage 0 to stage 1, which makes {now} microbatches/s: it brings the run "
        f"from {now} to {rate} ({gain}); it downloads 2 GB in about 20 s, goes on with its old "
        f"stage meanwhile ({rate} microbatches/s without it), and has paid for that {paid} s later"
    )


# ---------------------------------------------------------------- whatever the fleet


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[StageLoad], list[PeerLoad]]:
    count = draw(st.integers(1, 4))
    works = st.sampled_from([0.5, 1.0, 1.7, 3.0])
    stages = [
        stage(i, draw(works), draw(st.sampled_from([10, 30])), draw(st.sampled_from([1, 300])))
        for i in range(count)
    ]
    peers = [
        PeerLoad(
            PeerId(f"p{number}"),
            StageIndex(number if number < count else draw(st.integers(0, count - 1))),
            draw(st.sampled_from([0.3, 1.0, 1.0, 2.5, 7.0])),
            offers(draw(st.sampled_from([30, 60]))),
            draw(st.sampled_from([0.5, 4.0])),
            draw(st.sampled_from([True, True, True, False])),
        )
        for number in range(draw(st.integers(count, 12)))
    ]
    return stages, peers


policies = st.builds(
    MovePolicy,
    minimum_replicas=st.integers(1, 3),
    horizon_seconds=st.sampled_from([100.0, 1800.0]),
    margin=st.sampled_from([0.0, 2.0]),
    minimum_gain=st.sampled_from([0.0, 0.005, 0.3]),
    rate_noise=st.sampled_from([0.0, 0.03]),
)


@settings(max_examples=60)
@given(fleets(), policies, st.sets(st.integers(0, 3).map(StageIndex)))
def test_every_move_is_allowed_and_the_run_is_never_slower_for_them(
    scene: tuple[list[StageLoad], list[PeerLoad]], policy: MovePolicy, resting: set[StageIndex]
) -> None:
    stages, peers = scene
    decision = choose_moves(stages, peers, policy, resting)
    before = {p.peer: p for p in peers}
    by_peer = {move.peer: move for move in decision.moves}
    for move in decision.moves:
        mover = before[move.peer]
        assert mover.may_move
        assert mover.stage == move.source != move.destination
        assert mover.memory.holds(stages[move.destination].memory)
        both = stages[move.source].memory + stages[move.destination].memory
        assert move.release_first == (not mover.memory.holds(both))
        assert move.planned_rate >= move.pipeline_rate * (1 + policy.minimum_gain)
        assert move.sentence("x")
        if move.partner is None:
            assert sum(p.stage == move.source for p in peers) > policy.minimum_replicas
        else:
            back = by_peer[move.partner]
            assert (back.source, back.destination) == (move.destination, move.source)
            assert back.partner == move.peer
            assert not move.release_first
    pairs = {frozenset((move.source, move.destination)) for move in decision.moves}
    touched = [s for pair in pairs for s in pair]
    assert len(touched) == len(set(touched)), "a stage is part of one move or exchange at most"
    assert not set(touched) & resting
    settled = min(stage_rates(stages, after(peers, decision)))
    assert settled >= min(stage_rates(stages, peers)) * (1 - 1e-9)


def best_step(stages: list[StageLoad], peers: list[PeerLoad]) -> tuple[bool, float]:
    """The rate that the slower of two stages reaches by the best single move to the slowest stage,
    or if no move helps by the best exchange with it; and whether that is an exchange."""
    rates = stage_rates(stages, peers)
    low = min(rates)
    there = stages[rates.index(low)]
    movers = [p for p in peers if p.may_move and p.stage != there.stage]

    def level(mover: PeerLoad, back: PeerLoad | None = None) -> float:
        here = stages[mover.stage]
        took, gave = (back.rate_at(there), back.rate_at(here)) if back is not None else (0.0, 0.0)
        return min(
            low + mover.rate_at(there) - took, rates[here.stage] - mover.rate_at(here) + gave
        )

    moved = [
        level(p)
        for p in movers
        if p.memory.holds(there.memory) and sum(q.stage == p.stage for q in peers) > 1
    ]
    best = max(moved, default=0.0)
    if best > low * (1 + RATE_TOLERANCE):
        return False, best
    exchanged = [
        level(p, back)
        for p in movers
        for back in peers
        if back.stage == there.stage and back.may_move
        and all(q.memory.holds(there.memory + stages[p.stage].memory) for q in (p, back))
    ]  # fmt: skip
    return True, max(exchanged, default=0.0)


@settings(max_examples=100)
@given(fleets())
def test_the_slowest_stage_is_helped_by_the_best_move_or_else_the_best_exchange(
    scene: tuple[list[StageLoad], list[PeerLoad]],
) -> None:
    stages, peers = scene
    rates = stage_rates(stages, peers)
    low = min(rates)
    exchange, best = best_step(stages, peers)
    moves = choose_moves(stages, peers, FREE).moves
    if best <= low * (1 + RATE_TOLERANCE):
        assert not moves
        return
    if rates.count(low) == 1:
        assert moves, "the pipeline is faster after the first move alone"
    if moves:
        first = moves[0]
        assert (first.partner is not None) == exchange
        assert first.destination == rates.index(low)
        gave = moves[1].rate if exchange else 0.0
        took = rates[first.destination] - moves[1].source_rate if exchange else 0.0
        reached = min(first.destination_rate + first.rate - took, first.source_rate + gave)
        assert reached == pytest.approx(best)


@settings(max_examples=50)
@given(fleets())
def test_it_comes_to_rest(scene: tuple[list[StageLoad], list[PeerLoad]]) -> None:
    settle(*scene)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.data())
def test_like_peers_end_as_well_spread_as_can_be(counts: list[int], data: st.DataObject) -> None:
    works = data.draw(st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=5, max_size=5))
    stages = [stage(i, works[i]) for i in range(len(counts))]
    settled = min(stage_rates(stages, settle(stages, fleet(*counts))))
    # With a rate of T every stage needs at least T times its work in peers, rounded up.
    candidates = sorted(
        {k / s.work_flops for s in stages for k in range(1, sum(counts) + 1)}, reverse=True
    )
    best = next(
        rate
        for rate in candidates
        if sum(-(-rate * s.work_flops // 1) for s in stages) <= sum(counts) + 1e-9
    )
    assert settled == pytest.approx(best)


def test_small_random_fleets_end_within_two_percent_of_the_optimum_on_average() -> None:
    rng = random.Random(1)
    shares = []
    for _ in range(30):
        stages = [stage(i) for i in range(2 + rng.randrange(2))]
        peers = [peer(f"p{i}", i % len(stages), rng.lognormvariate(0, 0.5)) for i in range(6)]
        shares.append(min(stage_rates(stages, settle(stages, peers))) / optimum(stages, peers))
    assert sum(shares) / len(shares) >= 0.98


def thin(name: str, at: int, up: float) -> PeerLoad:
    """Computes as fast as its neighbours, and has a line of so many bytes per second."""
    return replace(peer(name, at, speed=4.0), up_bytes_per_second=up)


def test_a_peer_s_line_bounds_what_it_adds_to_a_stage() -> None:
    middle = replace(stage(1), sent_bytes=20)
    assert thin("a", 0, up=10.0).rate_at(middle) == 0.5
    assert thin("a", 0, up=1000.0).rate_at(middle) == 4.0
    assert thin("a", 0, up=10.0).rate_at(stage(0)) == 4.0, "nothing is sent there"
    assert stage_rates([stage(0), middle], [thin("a", 1, up=10.0)]) == [0.0, 0.5]


def test_of_peers_that_compute_alike_the_one_with_the_better_line_goes_where_more_is_sent() -> None:
    stages = [replace(stage(0), sent_bytes=10), replace(stage(1), sent_bytes=20)]
    peers = [
        thin("thin", 0, up=10.0), thin("thick", 0, up=60.0),
        replace(peer("stays", 0, speed=4.0), may_move=False), peer("alone", 1, speed=1.0),
    ]  # fmt: skip
    (move,) = choose_moves(stages, peers, FREE).moves
    assert move.peer == "thick"
    assert move.rate == 3.0


def test_a_line_that_would_be_too_thin_there_is_no_reason_to_move() -> None:
    stages = [stage(0), replace(stage(1), sent_bytes=1000)]
    peers = [thin("a", 0, up=1.0), thin("b", 0, up=1.0), peer("c", 1, speed=1.0)]
    gained = choose_moves(stages, peers, MovePolicy(rate_noise=0.0, margin=0.0))
    assert gained.moves == ()
