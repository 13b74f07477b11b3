"""The rates that peers report, and what the roster has of them."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kits.swarm_world.event_bench import Bench, joined
from swarm_coordinator.core.rules.microbatches.heartbeats import RATE_NOISE
from swarm_coordinator.core.state.peers import (
    GREAT_RATE_RATIO,
    LEAST_RATE_TOLERANCE,
    MOST_RATE_TOLERANCE,
    rate_tolerance,
)
from swarm_shared.base.types import StageIndex
from swarm_shared.protocol import Heartbeat


def training() -> Bench:
    """Two peers a stage, one step done, the second being collected."""
    bench = joined("a0", "b0", "a1", "b1", steps=1_000)
    bench.one_step()
    return bench


def published_rate(bench: Bench, peer: str) -> float:
    records = chain.from_iterable(bench.run.peers.roster())
    return next(r.microbatches_per_second for r in records if r.peer == peer)


def test_a_rate_holds_until_another_one_is_reported_and_not_beyond_its_session() -> None:
    bench = training()
    told = bench.peer("b0")
    bench.send("b0", Heartbeat(microbatches_per_second=3.0))
    bench.send("b0", Heartbeat(queued=2))
    assert (told.rates.microbatches_per_second, told.rates.queued) == (3.0, 2)
    for _ in range(40):
        bench.send("b0", Heartbeat())
    work = bench.run.rebalancing.stages[0].work_flops
    assert told.rates.flops_per_second == pytest.approx(3.0 * work)
    bench.attach("b0", stage=0, version=1)
    bench.send("b0", Heartbeat())
    assert bench.peer("b0").rates.microbatches_per_second == 0.0


def test_a_rate_that_has_changed_is_in_the_next_roster_and_in_the_stages_rates() -> None:
    bench = training()
    bench.send("b0", Heartbeat(microbatches_per_second=3.0))
    before, row = bench.run.peers.roster()[0], bench.run.peers.stage_rows()[0]
    bench.send("b0", Heartbeat(microbatches_per_second=9.0))
    after = {record.peer: record.microbatches_per_second for record in bench.run.peers.roster()[0]}
    assert after["b0"] == 9.0
    assert bench.run.peers.roster()[0] != before
    assert bench.run.peers.stage_rows()[0].microbatches_per_second > row.microbatches_per_second


def test_a_peer_is_expected_to_compute_at_its_next_stage_as_at_the_last_one() -> None:
    """Without a measurement it would count as the mean of its stage."""
    bench = training()
    first, second = bench.run.rebalancing.stages
    stages = bench.run.rebalancing.stages = (first, replace(second, work_flops=4.0))
    b0 = bench.peer("b0")
    bench.send("b0", Heartbeat(microbatches_per_second=3.0))
    bench.run.hold(b0, StageIndex(1), b0.version)
    expected = 3.0 * stages[0].work_flops / stages[1].work_flops
    assert published_rate(bench, "b0") == pytest.approx(expected)
    for nothing_measured in (Heartbeat(), Heartbeat(microbatches_per_second=0.0)):
        bench.send("b0", nothing_measured)
        assert b0.rates.microbatches_per_second == pytest.approx(expected)
        assert b0.rates.flops_per_second == pytest.approx(3.0 * stages[0].work_flops)
    bench.send("b0", Heartbeat(microbatches_per_second=7.0))
    assert b0.rates.microbatches_per_second == 7.0


def test_a_slow_uplink_bounds_what_is_expected_at_the_next_stage() -> None:
    bench = training()
    b0, stage = bench.peer("b0"), bench.run.rebalancing.stages[1]
    bench.send("b0", Heartbeat(microbatches_per_second=3.0, up_bytes_per_second=stage.sent_bytes))
    bench.run.hold(b0, StageIndex(1), b0.version)
    assert published_rate(bench, "b0") == pytest.approx(1.0)


def test_the_roster_of_a_step_has_the_average_of_reports_that_differ_by_noise() -> None:
    bench = training()
    draw = random.Random(5)
    pairs = []
    for _ in range(200):
        reported = 3.0 * draw.gauss(1.0, 0.03)
        bench.send("b0", Heartbeat(microbatches_per_second=reported))
        bench.one_step()
        pairs.append((reported, published_rate(bench, "b0")))
    reports, published = (statistics.pstdev(of) for of in zip(*pairs[20:], strict=True))
    assert published < 0.6 * reports


@given(st.floats(0.1, 10.0), st.floats(0.1, 10.0))
def test_a_change_beyond_noise_is_in_the_roster_of_the_next_step(
    before: float, after: float
) -> None:
    assume(abs(after / before - 1) > 0.2)
    bench = training()
    for _ in range(3):
        bench.send("b0", Heartbeat(microbatches_per_second=before))
    bench.send("b0", Heartbeat(microbatches_per_second=after))
    bench.one_step()
    assert published_rate(bench, "b0") == pytest.approx(after, rel=RATE_NOISE)


@pytest.mark.parametrize("change", [0.95, 1.05])
def test_a_small_change_of_a_rate_is_published_where_few_peers_receive_it(change: float) -> None:
    bench = training()
    rates = []
    for reported in (3.0, 3.0 * change):
        for _ in range(40):
            bench.send("b0", Heartbeat(microbatches_per_second=reported))
        bench.one_step()
        rates.append(published_rate(bench, "b0"))
    assert rates[0] == 3.0
    assert rates[1] == pytest.approx(3.0 * change, rel=LEAST_RATE_TOLERANCE)


@given(st.floats(0.01, 4.0))
def test_the_roster_of_a_running_step_changes_with_great_changes_of_a_rate_only(
    change: float,
) -> None:
    bench = training()
    bench.send("b0", Heartbeat(microbatches_per_second=3.0))
    bench.one_step()
    plan = bench.run.peers.roster()
    bench.send("b0", Heartbeat(microbatches_per_second=3.0 * change))
    is_great = not 1 / GREAT_RATE_RATIO <= change <= GREAT_RATE_RATIO
    assert (bench.run.peers.roster() != plan) == is_great
    assert bench.run.peers.roster()[1] is plan[1]


def test_the_tolerance_of_a_rate_grows_with_the_peers_that_receive_it() -> None:
    assert rate_tolerance(1) == rate_tolerance(100) == LEAST_RATE_TOLERANCE
    assert rate_tolerance(250) == pytest.approx(0.05)
    assert rate_tolerance(500) == rate_tolerance(100_000) == MOST_RATE_TOLERANCE
