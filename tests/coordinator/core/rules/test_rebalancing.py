"""The coordinator's decisions on moves, their texts, and their execution."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from kits.memory import offers
from kits.swarm_world.event_bench import Bench, joined
from swarm_coordinator.core.events import Note, ReceiptsVerified, StateDigest, Tick
from swarm_coordinator.core.rules import membership
from swarm_coordinator.core.rules.rebalancing import rebalancing_of
from swarm_coordinator.core.rules.state_transfer import MAX_CLOSE_DELAYS
from swarm_coordinator.core.state.moves import RebalancingRule, RebalancingSettings
from swarm_coordinator.core.state.phases import RunPhase
from swarm_shared.base.types import PeerId, StageIndex, Step, Version
from swarm_shared.protocol import (
    AssignStage,
    Heartbeat,
    Leaving,
    Ready,
    SaveSnapshot,
    SyncFailed,
)
from swarm_shared.scheduling.claimed_rates import MAX_RATE_OVER_MEDIAN
from swarm_shared.scheduling.placement import MoveDecision, MovePolicy

PERIOD = 60.0
SHA = "a" * 64


def lopsided(memory_bytes: int = 1000, at_stage_1: str = "d", at_stage_0: str = "abc") -> Bench:
    """By default stage 0 has a, b and c, and stage 1 has d alone; all make one microbatch/s.
    Version 1."""
    bench = Bench()
    policy = MovePolicy(period_seconds=PERIOD, rate_noise=0.0)
    settings = RebalancingSettings(RebalancingRule.THROUGHPUT, policy)
    bench.run.rebalancing = rebalancing_of(bench.manifest, settings)
    for stage, peers in enumerate((at_stage_0, at_stage_1)):
        for peer in peers:
            bench.request(peer, stage, memory=offers(memory_bytes), wanted_stage=stage)
            state = bench.peer(peer)
            state.profile = replace(state.profile, wanted_stage=None)  # it would be moved, too
    for peer in at_stage_0 + at_stage_1:
        bench.ready(peer)
    bench.one_step()
    assert bench.run.history.version == 1
    return bench


def decided(bench: Bench) -> str:
    """The moving peer, after one period."""
    bench.tick(PERIOD + 1.0)
    (mover,) = bench.run.peers.movers
    return mover


def told(bench: Bench) -> dict[str, Any]:
    return bench.status().rebalancing.model_dump()


def test_no_peer_moves_to_a_full_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = lopsided()
    monkeypatch.setattr(membership, "MAX_STAGE_PEERS", 1)
    bench.tick(PERIOD + 1.0)
    assert not bench.run.peers.movers


@pytest.mark.parametrize(
    ("longest_of_policy", "allowed"), [(math.inf, 30.0), (1000.0, 30.0), (20.0, 20.0)]
)
def test_no_peer_moves_whose_download_takes_longer_than_a_step_and_its_wait_or_the_policy_allows(
    longest_of_policy: float, allowed: float
) -> None:
    """A step takes ten seconds here, and its close waits for twenty."""
    bench = lopsided()
    settings = bench.run.rebalancing.settings
    bench.run.rebalancing.settings = replace(
        settings, policy=replace(settings.policy, longest_download_seconds=longest_of_policy)
    )
    limits = bench.run.manifest.limits.model_copy(update={"join_hold_seconds": 20.0})
    bench.run.manifest = bench.run.manifest.model_copy(update={"limits": limits})
    assert bench.run.history.last_applied is not None
    bench.run.history.last_applied = replace(bench.run.history.last_applied, seconds=10.0)
    size = bench.run.rebalancing.stages[1].state_bytes
    for peer in "abc":
        bench.peer(peer).rates.download_bytes_per_second = size / (allowed + 1)
    bench.tick(PERIOD + 1.0)
    assert not bench.run.peers.movers
    bench.peer("b").rates.download_bytes_per_second = size / (allowed - 1)
    assert decided(bench) == "b"


def fetch_beside(bench: Bench, mover: str) -> AssignStage:
    """Send the moving peer its source for the next stage, whose holder has saved the state."""
    (asked,) = bench.sent("d", SaveSnapshot, bench.log)
    assert asked.stage == 1
    (assigned,) = bench.sent(mover, AssignStage, bench.save("d"))
    return assigned


def test_a_decision_names_its_peer_its_gain_and_its_cost() -> None:
    bench = lopsided()
    mover = decided(bench)
    (decision,) = told(bench)["decisions"]
    text = decision["text"]
    assert decision["peer"] == mover
    assert f"{mover} (…{mover}) moves from stage 0 to stage 1, which makes 1 microbatches/s" in text
    assert "brings the run from 1 to 2 (+100.0 %)" in text
    assert "it downloads" in text
    assert "goes on with its old stage meanwhile (2 microbatches/s without it)" in text
    assert "has paid for that" in text
    assert told(bench)["on_the_way"] == 1


def test_a_peer_that_has_moved_counts_with_the_rate_that_it_measured_before() -> None:
    """And not with the mean of its new stage, until it has measured there."""
    bench = lopsided()
    mover = decided(bench)
    bench.send(mover, Heartbeat(microbatches_per_second=5.0))
    fetch_beside(bench, mover)
    bench.send(mover, Ready(stage=StageIndex(1), version=Version(1), digest="d"))
    bench.one_step()
    (rate,) = (
        record.microbatches_per_second
        for record in bench.run.peers.roster()[1]
        if record.peer == mover
    )
    expected = bench.peer(mover).rates.flops_per_second / bench.run.rebalancing.stages[1].work_flops
    assert rate == pytest.approx(expected)
    assert rate > 1.2


def test_the_old_stage_is_served_until_a_step_is_applied_with_the_new_one() -> None:
    bench = lopsided()
    mover = decided(bench)
    assigned = fetch_beside(bench, mover)
    assert (assigned.prepare, assigned.stage, assigned.version) == (True, 1, 1)
    assert bench.peer(mover).stage == 0
    bench.send(mover, Ready(stage=StageIndex(1), version=Version(1), digest="d"))
    assert mover in {record.peer for record in bench.run.peers.roster()[0]}

    bench.fill()
    close = bench.close_of(mover)
    other = next(peer for peer in "abc" if peer != mover)
    assert mover in close.reductions[0].members  # what it has counted in the old stage counts
    assert close.moving[0].members == tuple(sorted(("d", mover)))
    assert bench.close_of("d").reductions == close.moving
    assert bench.close_of(other).moving == ()
    bench.average_all()
    bench.apply_all()
    assert bench.peer(mover).stage == 1
    assert bench.run.history.version == 2
    assert mover in {record.peer for record in bench.run.peers.roster()[1]}
    moved = {"made": 1, "bytes_moved": bench.state_bytes(1)}
    assert moved.items() <= told(bench).items()
    bench.request("new", 0, wanted_stage=0)
    for holder in set("abc") - {mover}:
        bench.save(holder)
    assert bench.sent("new", AssignStage)
    assert moved.items() <= told(bench).items(), "who joins moves nothing"


def test_a_joining_peer_takes_a_lost_stage_that_another_peer_is_moving_to() -> None:
    bench = lopsided()
    mover = decided(bench)
    bench.lose(next(peer for peer in "abc" if peer != mover))
    bench.lose("d")
    assert bench.peer(mover).moving is not None
    bench.request("new", 0)
    assert bench.peer("new").stage == 1


def test_a_close_that_fails_leaves_the_mover_where_it_is() -> None:
    bench = lopsided()
    mover = decided(bench)
    fetch_beside(bench, mover)
    bench.send(mover, Ready(stage=StageIndex(1), version=Version(1), digest="d"))
    bench.fill()
    assert bench.close_of(mover).moving
    bench.failed(mover)
    assert bench.run.phase is RunPhase.COLLECT
    bench.tick(2.0)
    assert bench.run.phase is RunPhase.CLOSING
    assert bench.close_of(mover).moving == ()
    assert bench.peer(mover).stage == 0
    assert told(bench)["dropped"] == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_move_for_which_the_members_average_ends_with_their_round(fails: bool) -> None:
    """Also when the mover wants to leave meanwhile: the others have its next stage's group."""
    bench = lopsided()
    mover = decided(bench)
    fetch_beside(bench, mover)
    bench.send(mover, Ready(stage=StageIndex(1), version=Version(1), digest="d"))
    bench.fill()
    bench.send(mover, Leaving())
    if fails:
        bench.failed(mover)
    else:
        bench.average_all()
        bench.apply_all()
    made = {"made": 0, "dropped": 1} if fails else {"made": 1, "dropped": 0}
    assert made.items() <= told(bench).items()


def test_a_move_whose_state_is_not_there_is_given_up_also_while_its_stage_averages() -> None:
    bench = lopsided()
    mover = decided(bench)
    bench.fill()
    assert bench.run.phase is RunPhase.CLOSING
    bench.send(mover, Leaving())
    assert bench.peer(mover).moving is None


def test_a_mover_that_its_stage_has_come_to_need_stays() -> None:
    bench = lopsided()
    mover = decided(bench)
    fetch_beside(bench, mover)
    bench.send(mover, Ready(stage=StageIndex(1), version=Version(1), digest="d"))
    bench.pause(*(set("abc") - {mover}))
    bench.fill()
    assert bench.close_of(mover).moving == ()
    assert bench.peer(mover).moving is None
    assert told(bench)["dropped"] == 1


def test_a_move_whose_downloads_keep_failing_is_given_up() -> None:
    bench = lopsided()
    mover = decided(bench)
    failed = SyncFailed(stage=StageIndex(1), version=Version(1), reason="the connection broke")
    for _ in range(MAX_CLOSE_DELAYS):
        assert bench.sent(mover, AssignStage, bench.save("d"))
        bench.send(mover, failed)
        assert bench.sent("d", SaveSnapshot, bench.tick(1.5))
    bench.save("d")
    commands = bench.send(mover, failed)
    assert not bench.run.peers.movers
    notes = [note.text for note in bench.commands(Note, commands)]
    assert (
        f"{mover} (…{mover}) does not move to stage 1: its downloads take longer than a step"
        in notes
    )
    assert [row.peers for row in bench.run.peers.stage_rows()] == [3, 1]


def test_the_last_holders_of_two_stages_exchange_them_in_one_close() -> None:
    bench = joined("a0", "a1")
    bench.prepare_move("a0", 1, partner="a1")
    bench.prepare_move("a1", 0, partner="a0")
    bench.fill()
    commands = bench.average_all()
    assert [bench.peer(peer).stage for peer in ("a0", "a1")] == [1, 0]
    notes = [note.text for note in bench.commands(Note, commands)]
    assert notes == [
        "a0 (…a0) switches from stage 0 to stage 1", "a1 (…a1) switches from stage 1 to stage 0",
    ]  # fmt: skip
    bench.apply("a0", digest="of stage 1")
    bench.apply("a1", digest="of stage 0")
    assert bench.run.history.digests() == (
        StateDigest(StageIndex(0), "of stage 0"), StateDigest(StageIndex(1), "of stage 1"),
    )  # fmt: skip


def test_what_a_mover_has_counted_ahead_at_its_old_stage_is_counted_anew() -> None:
    bench = joined("a0", "b0", "c0", "a1", staleness=1)
    bench.prepare_move("c0", 1)
    ahead = bench.receipt("c0", 1, step=Step(2))
    bench.event(ReceiptsVerified(bench.session("c0"), PeerId("c0"), (ahead,)))
    assert bench.run.steps.ahead is not None
    assert set(bench.run.steps.ahead.table) == {(1, 0)}
    bench.fill()
    bench.average_all()
    bench.apply_all()
    assert (bench.peer("c0").stage, bench.step().step) == (1, 2)
    assert not bench.step().table


def test_a_peer_without_room_for_both_gives_the_old_one_up_between_two_steps() -> None:
    bench = lopsided(memory_bytes=150)
    mover = decided(bench)
    (decision,) = told(bench)["decisions"]
    assert "cannot go on with its old stage meanwhile" in decision["text"]
    assert not bench.sent(mover, AssignStage, bench.log[-50:])
    bench.one_step()
    peer = bench.peer(mover)
    assert (peer.stage, peer.moving) == (1, None)


def test_a_loss_is_looked_at_at_once_and_each_stage_still_rests_for_its_period() -> None:
    bench = lopsided(at_stage_0="abcgh", at_stage_1="def")
    bench.tick(PERIOD / 2)
    assert not bench.run.peers.movers
    bench.lose("e")
    bench.lose("f")
    reaction_seconds = RebalancingSettings().loss_reaction_seconds + 2.0
    bench.tick(reaction_seconds)
    (mover,) = bench.run.peers.movers
    bench.lose(mover)
    bench.tick(reaction_seconds)
    assert not bench.run.peers.movers, "although four are at stage 0, and one at stage 1"
    bench.tick(PERIOD)
    assert len(bench.run.peers.movers) == 1


def test_a_loss_brings_one_decision_forward_by_which_the_lost_together_are_known() -> None:
    bench = lopsided()
    decided_at: list[float] = []

    def choose(*_: object) -> MoveDecision:
        decided_at.append(bench.now)
        return MoveDecision((), "nothing to gain")

    settings = replace(bench.run.rebalancing.settings, choose=choose)
    bench.run.rebalancing.settings = settings
    bench.tick(PERIOD / 2)
    bench.lose("c")
    lost_at = bench.now
    bench.tick(PERIOD / 2)
    assert [at - lost_at for at in decided_at] == [settings.loss_reaction_seconds]


def test_a_run_in_balance_gives_the_reason_for_no_move() -> None:
    bench = lopsided()
    for peer, rate in zip("abcd", (1.0, 1.0, 1.0, 3.0), strict=True):
        for _ in range(40):
            bench.send(peer, Heartbeat(microbatches_per_second=rate, queued=0))
    bench.run.rebalancing.due_at = bench.now
    bench.event(Tick())
    assert not bench.run.peers.movers
    assert "is the slowest" in str(told(bench)["reason"])


def test_the_roster_has_more_of_a_claimed_rate_once_the_peer_has_counted_more_than_others() -> None:
    bench = joined("a0", "b0", "c0", "d0", stages=1, microbatches=8, starting=4)

    def published() -> dict[str, float]:
        (records,) = bench.run.peers.roster()
        return {str(record.peer): record.microbatches_per_second for record in records}

    for peer, rate in (("a0", 1.0), ("b0", 1.0), ("c0", 1.0), ("d0", 9.0)):
        bench.send(peer, Heartbeat(microbatches_per_second=rate))
    others = dict.fromkeys(("a0", "b0", "c0"), 1.0)
    assert published() == others | {"d0": MAX_RATE_OVER_MEDIAN}
    for peer, counts in (("a0", [0]), ("b0", [1]), ("c0", [2]), ("d0", [3, 4, 5, 6, 7])):
        bench.report(peer, *counts)
    bench.average_all()
    bench.apply_all()
    assert published() == others | {"d0": 9.0}


def test_the_rate_of_a_peer_and_its_stage_is_bounded_by_its_uplink() -> None:
    bench = lopsided()
    sent = bench.run.rebalancing.stages[0].sent_bytes
    assert sent > 0
    bench.tick(1.0)
    beat = Heartbeat(microbatches_per_second=1.0, queued=0, up_bytes_per_second=sent / 4)
    bench.send("a", beat)
    assert bench.peer("a").rates.microbatches_per_second == 0.25
    assert bench.run.peers.stage_rows()[0].microbatches_per_second == 2.25
    bench.send("a", Heartbeat())
    assert bench.peer("a").rates.microbatches_per_second == 0.25, "nothing new was said"
    bench.send("a", Heartbeat(up_bytes_per_second=0.0))
    assert bench.run.peers.stage_rows()[0].microbatches_per_second == 3.0
