"""Utilisation of stages, service times of microbatches, and rejections: sums of bounded size."""

from __future__ import annotations

from typing import Any

import pytest

from kits.swarm_world.event_bench import Bench, joined
from swarm_coordinator.core.events import ReceiptsVerified
from swarm_coordinator.core.state.utilisation import (
    BOUNDS,
    MAX_UNREPORTED_SECONDS,
    LastHeartbeat,
    Rejection,
    UtilisationStats,
    quantile,
)
from swarm_coordinator.status.builder import figures_of as figures_of_stats
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.protocol import Heartbeat, NotFinite

ZERO = StageIndex(0)
WITHIN = 2**0.5 - 1
"""Allowed relative error of a quantile: a bucket's width."""


def heard(
    figures: UtilisationStats, seconds: int, busy: float, microbatches: int, start: int = 0
) -> None:
    """One peer at stage 0 with a heartbeat every second."""
    beat = LastHeartbeat()
    for second in range(start, start + seconds + 1):
        figures.record(beat, ZERO, busy, microbatches, float(second))


def test_a_stage_is_idle_for_the_time_that_its_peers_did_not_compute() -> None:
    figures = UtilisationStats(2)
    heard(figures, 30, 0.75, 3)
    heard(figures, 30, 0.25, 1)
    first, second = figures.recent()
    assert first.idle_share == pytest.approx(0.5)
    assert second.idle_share is None
    assert figures_of_stats(figures).bubble_share == pytest.approx(0.5)


def test_quantiles_are_those_of_the_microbatches_within_a_buckets_width() -> None:
    figures = UtilisationStats(1)
    heard(figures, 9, 0.9, 9)  # 81 of 0.1 s
    heard(figures, 9, 0.8, 1)  # 9 of 0.8 s
    heard(figures, 10, 0.0, 0)
    [tally] = figures.recent()
    assert sum(tally.buckets) == 90
    assert quantile(tally.buckets, 0.5) == pytest.approx(0.1, rel=WITHIN)
    assert quantile(tally.buckets, 0.95) == pytest.approx(0.8, rel=WITHIN)


@pytest.mark.parametrize("seconds", [0.0001, 0.001, 0.37, 900.0, 5000.0])
def test_a_quantile_is_within_the_bounds_however_long_a_microbatch_takes(seconds: float) -> None:
    figures = UtilisationStats(1)
    beat = LastHeartbeat()
    figures.record(beat, ZERO, 0.0, 0, 0.0)
    figures.record(beat, ZERO, seconds, 1, MAX_UNREPORTED_SECONDS)
    found = quantile(figures.recent()[0].buckets, 0.5)
    assert found is not None
    assert 0 < found <= BOUNDS[-1]


def test_nothing_seen_has_no_quantile() -> None:
    assert quantile([0] * (len(BOUNDS) + 1), 0.5) is None


def test_a_microbatch_that_takes_longer_than_a_heartbeat_counts_whole_when_it_is_done() -> None:
    figures = UtilisationStats(1)
    beat = LastHeartbeat()
    for second in range(13):
        done = second in (6, 12)
        figures.record(beat, ZERO, 6.0 if done else 0.0, int(done), float(second))
    [tally] = figures.recent()
    assert tally.idle_share == pytest.approx(0.0)
    assert quantile(tally.buckets, 0.5) == pytest.approx(6.0, rel=WITHIN)


def test_a_claimed_time_is_cut_to_the_time_that_has_passed() -> None:
    figures = UtilisationStats(1)
    heard(figures, 10, 1e9, 1)
    heard(figures, 10, 0.0, 0)
    [tally] = figures.recent()
    assert tally.busy_seconds == 10.0
    assert tally.idle_share == pytest.approx(0.5)


def test_what_was_long_ago_is_in_the_sums_and_not_in_what_is_recent() -> None:
    figures = UtilisationStats(1)
    heard(figures, 300, 0.0, 0)
    heard(figures, 300, 1.0, 1, start=300)
    assert figures.recent()[0].idle_share == pytest.approx(0.0)
    assert figures.totals[0].held_seconds == 600.0
    assert figures.totals[0].busy_seconds == 300.0


def test_the_figures_of_a_long_run_take_no_more_room_than_those_of_a_short_one() -> None:
    figures = UtilisationStats(1)
    heard(figures, 5000, 0.5, 5)
    assert len(figures.totals[0].buckets) == len(BOUNDS) + 1
    assert len(figures.rejected) == 0


# ---------------------------------------------------------------- what the core records


def stepping() -> Bench:
    return joined("a0", "b0", "c0", "a1")


def beat(bench: Bench, peer: str, **told: Any) -> None:
    bench.send(peer, Heartbeat(microbatches_per_second=1.0, queued=0, **told))


def figures_of(bench: Bench) -> dict[str, Any]:
    return bench.status().figures.model_dump()


def idle(bench: Bench, stage: int) -> Any:
    return figures_of(bench)["stages"][stage]["idle_share"]


def test_only_time_in_which_a_stage_could_compute_counts_as_idle() -> None:
    bench = stepping()
    for second in range(10):
        bench.now += 1.0
        beat(bench, "a1", computed=1, busy_seconds=1.0)
        beat(bench, "a0", computed=1, busy_seconds=0.5, paused=second > 4)
    assert idle(bench, 0) == pytest.approx(0.5)
    assert idle(bench, 1) == pytest.approx(0.0)
    assert bench.run.statistics.utilisation.totals[0].held_seconds == 4.0


def test_a_stage_that_waits_for_others_to_be_held_is_not_idle() -> None:
    bench = joined("a0")
    for _ in range(5):
        bench.now += 1.0
        beat(bench, "a0", computed=0, busy_seconds=0.0)
    assert idle(bench, 0) is None


def test_a_peer_without_a_reported_computing_time_is_left_out() -> None:
    bench = stepping()
    for _ in range(5):
        bench.now += 1.0
        beat(bench, "a0")
    assert idle(bench, 0) is None


def test_a_count_that_no_step_has_room_for_is_cut() -> None:
    bench = stepping()
    for _ in range(2):
        bench.now += 1.0
        beat(bench, "a0", computed=2**52, busy_seconds=1.0)
    most = bench.manifest.training.microbatches_per_step
    assert sum(bench.run.statistics.utilisation.totals[0].buckets) == most


def rejected(bench: Bench) -> dict[str, int]:
    return {reason: count for reason, count in figures_of(bench)["rejected"].items() if count}


def test_receipts_that_do_not_count_are_counted_by_the_reason() -> None:
    bench = stepping()
    bench.one_step()
    bench.report("a0", 0)
    assert rejected(bench) == {}
    good = bench.receipt("b0", 1)
    for changes in (
        {"step": Step(good.step + 1)},
        {"stage": StageIndex(1)},
        {"microbatch": MicrobatchIndex(9999)},
        {"tokens": good.tokens + 1},
    ):
        wrong = good.model_copy(update=changes)
        bench.event(ReceiptsVerified(bench.session("b0"), PeerId("b0"), (wrong,)))
    again = bench.receipt("b0", 0, step=Step(bench.run.history.version))
    bench.event(ReceiptsVerified(bench.session("b0"), PeerId("b0"), (again,)))
    assert rejected(bench) == {
        Rejection.OTHER_STEP: 1,
        Rejection.NOT_THE_HOLDER: 1,
        Rejection.IMPOSSIBLE: 2,
    }


def test_gradients_that_are_not_finite_and_parameters_that_differ_are_counted() -> None:
    bench = stepping()
    step = Step(bench.run.history.version + 1)
    for peer in ("b0", "a0"):  # the second one is not flagged: the model is the cause
        bench.send(peer, NotFinite(step=step, microbatch=MicrobatchIndex(0), sender=PeerId(peer)))
    assert rejected(bench) == {Rejection.NOT_FINITE: 2}
    bench = stepping()
    bench.one_step()
    bench.fill()
    bench.average_all()
    for peer in bench.closing():
        bench.apply(peer, "odd" if peer == "c0" else "d")
    assert rejected(bench) == {Rejection.OTHER_PARAMETERS: 1}
