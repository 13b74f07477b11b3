"""Close, norm, apply: when a step counts, and which attempts and members fail."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kits.swarm_world.event_bench import Bench, joined
from kits.swarm_world.facts import train_loss
from swarm_coordinator.core.events import (
    AppliedStep,
    Command,
    Note,
    Persist,
    Remember,
    Send,
    StepTimesRecord,
)
from swarm_coordinator.core.rules.step_close import MAX_CARRIER_FAILURES
from swarm_coordinator.core.state.peers import PeerPhase
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.steps import MAX_FAILED_ROUNDS, FailedRound
from swarm_shared.base.types import PeerId, StageIndex, Step
from swarm_shared.protocol import (
    AbortRound,
    Applied,
    Apply,
    AssignStage,
    Close,
    Heartbeat,
    Lease,
    Roster,
    RoundReport,
)
from swarm_shared.run.schedule import learning_rate

ALL = ("a0", "b0", "a1", "b1")


def closing(**options: Any) -> Bench:
    """Two peers a stage; everything is committed and the first close is under way."""
    bench = joined(*ALL, **options)
    bench.report("a0", 0)
    bench.report("b0", 1)
    bench.report("b1", 0, 1)
    assert bench.run.phase is RunPhase.CLOSING
    return bench


def closed_again(bench: Bench, seconds: float = 6.0) -> list[Command]:
    """After an abort: wait for the next close of the same step."""
    commands = bench.tick(seconds)
    assert bench.run.phase is RunPhase.CLOSING
    return commands


# ---- closing


def test_each_member_is_sent_its_group_and_its_commit_set() -> None:
    bench = closing()
    closes = {peer: bench.close_of(peer) for peer in ALL}
    committed = {peer: close.committed for peer, close in closes.items()}
    assert committed == {"a0": (0,), "b0": (1,), "a1": (), "b1": (0, 1)}
    for peer, close in closes.items():
        [own] = close.reductions
        assert own.part == "own"
        assert own.members == (("a0", "b0") if peer[1] == "0" else ("a1", "b1"))


def test_a_member_with_a_slow_uplink_sums_less_and_its_stage_receives_equal_weights() -> None:
    bench = Bench()
    thick, thin = Heartbeat(up_bytes_per_second=12.5e6), Heartbeat(up_bytes_per_second=6e5)
    bench.join_all("a0", "b0", "c0", "a1")
    for peer, beat in {"a0": thick, "b0": thin, "c0": thick, "a1": thin}.items():
        bench.send(peer, beat)
    bench.report("a0", 0, 1)
    bench.report("a1", 0, 1)
    of_first = [bench.close_of(peer).reductions for peer in ("a0", "b0", "c0")]
    assert {own.members for (own,) in of_first} == {("a0", "b0", "c0")}
    assert {own.weights for (own,) in of_first} == {(1000, 0, 1000)}
    assert bench.close_of("a1").reductions[0].weights == ()


def test_a_step_is_durable_before_any_member_is_sent_its_apply() -> None:
    bench = closing()
    for peer in ("a0", "b0", "a1"):
        assert not bench.commands(Persist, bench.averaged(peer, own=4.0 if peer[1] == "0" else 5.0))
    commands = bench.averaged("b1", own=5.0)
    [record] = [i for i, c in enumerate(commands) if isinstance(c, Persist)]
    told = [i for i, c in enumerate(commands) if isinstance(c, Send)]
    assert min(told) > record
    attempts = [bench.sent(peer, Apply)[0].attempt for peer in ALL]
    assert attempts == [bench.close_of(peer).attempt for peer in ALL]


def test_the_record_of_a_step_adds_up() -> None:
    bench = closing()
    bench.now += 3.0
    for peer in ALL:
        bench.averaged(peer, own=4.0 if peer[1] == "0" else 5.0)
    [record] = bench.records(AppliedStep)
    assert (record.step, record.tokens, record.seconds) == (1, 8, 3.0)
    assert record.loss == pytest.approx((train_loss(1, 0) + train_loss(1, 1)) / 8)
    assert record.global_norm == pytest.approx(3.0)
    assert record.learning_rate == learning_rate(bench.manifest.optimizer, 20, 1)
    shares = {(s.peer, s.stage): (s.microbatches, s.tokens) for s in record.shares}
    assert shares == {("a0", 0): (1, 4), ("b0", 0): (1, 4), ("b1", 1): (2, 8)}


def test_the_next_step_begins_when_every_member_has_applied() -> None:
    bench = closing()
    bench.average_all()
    for peer in ("a0", "b0", "a1"):
        bench.apply(peer)
        assert bench.run.phase is RunPhase.APPLYING
    commands = bench.apply("b1")
    assert bench.run.phase is RunPhase.COLLECT
    assert bench.step().step == 2
    assert any(bench.sent(peer, Lease, commands) for peer in ALL)


def times(bench: Bench, commands: list[Command]) -> dict[str, tuple[float, float]]:
    """When the parts of the step happened, in seconds from its decision."""
    [record] = [
        command.record for command in bench.commands(Remember, commands)
        if isinstance(command.record, StepTimesRecord)
    ]  # fmt: skip
    assert record.step == bench.run.history.version
    return {
        part.name if part.stage is None else f"{part.name} {part.stage}": (part.began, part.ended)
        for part in record.parts
    }


def test_the_times_of_a_steps_parts_are_recorded_when_all_have_applied() -> None:
    bench = closing()
    bench.now += 1.0
    bench.averaged("a0")
    bench.averaged("b0")
    bench.now += 2.0
    bench.averaged("a1")
    bench.averaged("b1")
    for seconds, peer in ((0.5, "a0"), (0.25, "a1"), (0.25, "b1")):
        bench.now += seconds
        bench.apply(peer)
    bench.now += 4.0
    commands = bench.apply("b0")
    assert times(bench, commands) == {
        "compute": (-3.0, -3.0), "close": (-3.0, 0.0),
        "average 0": (-3.0, -2.0), "average 1": (-3.0, 0.0),
        "apply": (0.0, 5.0), "apply 0": (0.0, 5.0), "apply 1": (0.0, 1.0),
    }  # fmt: skip


def test_an_attempt_that_failed_has_its_time_too() -> None:
    bench = closing()
    began = bench.now
    bench.now += 1.0
    bench.averaged("a0")
    bench.averaged("b0")
    bench.now += 1.0
    bench.failed("a1", carrier_failed=True)
    closed_again(bench)
    began_again = bench.step().closing.rounds[StageIndex(1)].began_at
    for peer in ("a1", "b1"):
        bench.averaged(peer)
    decided = bench.now
    commands = bench.apply_all()
    assert {name: (at[0] + decided, at[1] + decided) for name, at in times(bench, commands).items()
            if name not in ("compute", "apply", "apply 0", "apply 1")} == pytest.approx({
        "close": (began, decided), "average 0": (began, began + 1.0),
        "failed attempt 1": (began, began + 2.0), "average 1": (began_again, decided),
    })  # fmt: skip


def test_of_many_failed_attempts_the_newest_have_their_times() -> None:
    """Members decide how often an attempt fails; the record of the step stays small."""
    bench = closing()
    step = bench.run.steps.current
    assert step is not None
    for number in range(MAX_FAILED_ROUNDS + 3):
        step.failed_rounds.append(FailedRound(frozenset({StageIndex(1)}), bench.now, float(number)))
    bench.average_all()
    commands = bench.apply_all()
    [record] = [c.record for c in commands if isinstance(c, Remember)
                and isinstance(c.record, StepTimesRecord)]  # fmt: skip
    ended = [part.ended + bench.now for part in record.parts if part.name == "failed attempt"]
    assert ended == pytest.approx([float(number) for number in range(3, MAX_FAILED_ROUNDS + 3)])


def test_while_versions_differ_no_roster_is_sent() -> None:
    bench = closing()
    bench.average_all()
    bench.apply("a0")
    assert not bench.sent("a0", Roster, bench.lose("b0") + bench.tick(1.0))
    bench.apply("a1")
    [roster] = bench.sent("a0", Roster, bench.apply("b1"))
    assert {p.peer for p in roster.peers} == {"a0", "a1", "b1"}


# ---- tied embeddings


def test_tied_embeddings_are_reduced_a_second_time_over_first_and_last_stage() -> None:
    bench = joined("a0", "b0", "a1", "a2", stages=3, tied=True)
    bench.fill()
    for peer in ("a0", "b0", "a2"):
        own, tied = bench.close_of(peer).reductions
        assert (own.part, tied.part) == ("own", "tied")
        assert own.members == (("a0", "b0") if peer[1] == "0" else ("a2",))
        assert tied.members == ("a0", "a2", "b0")
    assert [r.part for r in bench.close_of("a1").reductions] == ["own"]


def test_the_norm_of_the_tied_part_counts_once() -> None:
    bench = joined("a0", "b0", "a1", "a2", stages=3, tied=True)
    bench.fill()
    for peer in ("a0", "b0", "a2"):
        bench.averaged(peer, own=1.0, tied=6.0)
    bench.averaged("a1", own=1.0)
    assert bench.records(AppliedStep)[0].global_norm == pytest.approx(3.0)


def test_one_stage_alone_has_nothing_to_reduce_a_second_time() -> None:
    bench = joined("a0", "b0", stages=1, tied=True)
    bench.fill()
    assert [r.part for r in bench.close_of("a0").reductions] == ["own"]


# ---- attempts that fail


def test_a_carrier_failure_counts_against_no_member_and_the_step_closes_the_next_time() -> None:
    bench = closing()
    commands = bench.failed("a0", culprit="b0", carrier_failed=True)
    assert all(bench.sent(peer, AbortRound, commands) for peer in ("a0", "b0"))
    assert not any(bench.sent(peer, AbortRound, commands) for peer in ("a1", "b1"))
    closed_again(bench)
    assert bench.step().failure_counts == {}
    bench.average_all()
    assert len(bench.records(AppliedStep)) == 1


def test_what_a_member_lacks_is_leased_again_for_its_stage_alone() -> None:
    bench = closing()
    bench.resolve_all()
    bench.failed("b1", missing=(1,))
    assert (1, 1) not in bench.step().table
    commands = bench.tick(1.0)
    assert [(m.microbatch, m.accumulate) for _, m in bench.leased(commands)] == [(1, (1,))]
    bench.report("a1", 1)
    closed_again(bench)
    assert bench.close_of("a1").committed == (1,)
    assert bench.close_of("b1").committed == (0,)


def test_no_peer_can_report_another_peer_s_microbatch_as_missing() -> None:
    bench = closing()
    bench.failed("a1", missing=(0, 1))
    assert len(bench.step().table) == 4


def test_what_is_not_counted_changes_nothing_when_it_is_reported_as_missing() -> None:
    bench = closing()
    bench.failed("b1", missing=(1, 7))
    assert set(bench.step().table) == {(0, 0), (1, 0), (0, 1)}
    bench.failed("b1", missing=(1,))
    assert set(bench.step().table) == {(0, 0), (1, 0), (0, 1)}


def test_a_member_that_emptied_its_accumulator_holds_nothing_any_more() -> None:
    bench = closing()
    bench.failed("b1", reset=True)
    assert {cell for cell in bench.step().table if cell[1] == 1} == set()


def test_a_second_member_s_report_of_the_same_failed_attempt_counts_as_well() -> None:
    bench = closing()
    bench.failed("a0", culprit="b0")
    assert bench.run.phase is RunPhase.COLLECT
    bench.failed("b1", reset=True)
    assert {cell for cell in bench.step().table if cell[1] == 1} == set()


@pytest.mark.parametrize("hearsay", [{"aborted_by": "a0"}, {"carrier_failed": True}], ids=str)
def test_after_an_attempt_only_what_members_have_seen_themselves_counts(
    hearsay: dict[str, Any],
) -> None:
    bench = joined("a0", "b0", "c0", "d0", "e0", "f0", stages=1)
    bench.fill()
    bench.failed("a0", culprit="f0")
    for member in ("b0", "c0", "d0"):
        bench.failed(member, culprit="f0", **hearsay)
    assert not bench.run.peers.excluded
    bench.failed("b0", culprit="f0")
    bench.failed("c0", culprit="f0")
    assert bench.run.peers.excluded == {"f0"}


def test_a_member_that_names_itself_after_an_attempt_is_not_at_odds_with_its_owner() -> None:
    bench = joined("a0", "a1", "b1", "c1")
    bench.join("b0", 0, owner=PeerId("owner"))
    bench.fill()
    bench.failed("a0")
    bench.failed("b0", culprit="b0")
    bench.request("c0", 0, owner=PeerId("owner"))
    assert bench.peer("c0").stage == 0


def test_a_report_of_an_earlier_attempt_is_ignored() -> None:
    bench = closing()
    old = bench.step().attempt
    bench.failed("a0")
    closed_again(bench)
    bench.failed("b0", attempt=old, reset=True)
    bench.averaged("b0", attempt=old)
    assert bench.run.phase is RunPhase.CLOSING
    assert len(bench.step().table) == 4
    assert not bench.step().closing.rounds[StageIndex(0)].reports


def test_every_further_attempt_waits_longer() -> None:
    bench = closing()
    pauses = []
    for culprit in ("a0", "b0", "a1", "b1", "a0"):
        bench.failed(culprit)
        began = bench.now
        while bench.run.phase is RunPhase.COLLECT:
            bench.tick(0.1)
        pauses.append(bench.now - began)
    assert pauses == pytest.approx([0.5, 1.0, 2.0, 4.0, 5.0], abs=0.25)


def test_an_attempt_s_number_is_used_once_in_the_life_of_a_run() -> None:
    bench = closing()
    bench.failed("a0")
    closed_again(bench)
    bench.average_all()
    bench.apply_all()
    bench.one_step()
    numbers = [c.attempt for c in bench.sent("a0", Close, bench.log)]
    assert len(numbers) == len(set(numbers)) == 3
    restarted = Bench.restarted(2)
    for peer in ALL:
        restarted.attach(peer, stage=int(peer[1]), version=2)
    restarted.fill()
    assert restarted.step().attempt not in numbers


def averaged_to(bench: Bench, norms: dict[str, float], part: str = "own") -> None:
    for peer, norm in norms.items():
        bench.averaged(peer, **{part: norm})


def test_two_replicas_that_average_to_different_gradients_average_once_more() -> None:
    bench = closing()
    averaged_to(bench, {"a0": 1.0, "b0": 1.0 + 1e-9, "a1": 1.0, "b1": 1.0})
    assert bench.run.phase is RunPhase.COLLECT
    assert not bench.records(AppliedStep)
    closed_again(bench)
    averaged_to(bench, {"a0": 1.0, "b0": 1.0, "a1": 1.0, "b1": 1.0})
    assert len(bench.records(AppliedStep)) == 1
    assert not bench.run.statistics.flags


def test_a_replica_that_never_agrees_with_the_other_one_does_not_stop_the_run() -> None:
    """Nothing shows which of two is right; the one that has been attached longest stays."""
    bench = joined("b0", "a0", "a1", "b1")
    for step in (1, 2):
        bench.fill()
        averaged_to(bench, {"a0": 1.5, "b0": 1.0, "a1": 1.0, "b1": 1.0})
        closed_again(bench)
        averaged_to(bench, {"a0": 1.5, "b0": 1.0, "a1": 1.0, "b1": 1.0})
        assert bench.closing() == ["b0", "a1", "b1"]
        bench.apply_all()
        assert [s.step for s in bench.records(AppliedStep)] == list(range(1, step + 1))
        assert bench.records(AppliedStep)[-1].global_norm == pytest.approx(math.sqrt(2.0))
        assert bench.peer("a0").phase is PeerPhase.SYNCING
        bench.save("b0")
        bench.tick(2.0)
        bench.ready("a0")
    assert list(bench.run.statistics.flags) == ["a0"]


@pytest.mark.parametrize("part", ["own", "tied"])
@pytest.mark.parametrize("liar", ["a0", "b0", "c0"])
def test_the_odd_one_of_three_is_excluded_and_the_step_ends_at_once(part: str, liar: str) -> None:
    bench = joined("a0", "b0", "c0", "a1", tied=part == "tied")
    bench.fill()
    norms = {peer: 1.0 + 1e-9 * (peer == liar) for peer in ("a0", "b0", "c0", "a1")}
    averaged_to(bench, norms, part)
    (record,) = bench.records(AppliedStep)
    assert sum(share.microbatches for share in record.shares if share.stage == 0) == 2
    assert liar not in bench.closing()
    assert list(bench.run.statistics.flags) == [liar]
    bench.apply_all()
    assert bench.peer(liar).phase is PeerPhase.SYNCING
    assert bench.run.history.version == 1


def test_a_norm_that_is_no_number_ends_the_attempt_and_not_the_coordinator() -> None:
    bench = closing()
    sound = RoundReport(step=Step(1), attempt=1, ok=True, own_squared=1.0)
    for peer in ALL:
        # Past the parser's check, which refuses it already.
        changes = {"attempt": bench.attempt_of(peer), "own_squared": 1.7e308}
        bench.send(peer, sound.model_copy(update=changes))
    assert not bench.records(AppliedStep)
    assert bench.run.phase is RunPhase.COLLECT


# ---- members that die, hang or fail repeatedly


def stage_1_has_averaged(bench: Bench) -> Bench:
    bench.averaged("a1")
    bench.averaged("b1")
    return bench


@pytest.mark.parametrize("when", ["last", "first, having applied"])
def test_a_member_that_dies_after_the_decision_does_not_hold_up_the_others(when: str) -> None:
    bench = closing()
    bench.average_all()
    if when == "last":
        bench.apply_all(but="b0")
        bench.lose("b0")
    else:
        bench.apply("b0")
        bench.lose("b0")
        bench.apply_all()
    assert bench.run.phase is RunPhase.COLLECT
    assert bench.step().step == 2


def test_the_last_member_that_is_waited_for_ends_the_step_also_if_it_cannot_apply_it() -> None:
    bench = closing()
    bench.average_all()
    bench.apply_all(but="b0")
    bench.failed("b0")
    assert bench.step().step == 2
    assert bench.peer("b0").phase is PeerPhase.SYNCING


def test_of_two_that_fail_twice_the_newer_one_is_excluded_and_synced_after_the_step() -> None:
    bench = stage_1_has_averaged(closing())
    for _ in range(2):
        bench.failed("a0", culprit="b0")
        bench.tick(1.0)
        bench.report("a0", 1)
        bench.tick(6.0)
    assert bench.closing() == ["a0", "a1", "b1"]
    assert not bench.sent("b0", Close)
    bench.averaged("a0")
    bench.apply_all()
    assert bench.peer("b0").phase is PeerPhase.SYNCING
    assert {p.peer for p in bench.run.peers.ready(0)} == {"a0"}
    bench.save("a0")
    assert len(bench.sent("b0", AssignStage)) == 1


def test_carrier_failures_beyond_the_limit_count_against_their_reporter() -> None:
    bench = stage_1_has_averaged(closing())
    for _ in range(MAX_CARRIER_FAILURES + 2):
        assert "b0" not in bench.run.peers.excluded
        bench.failed("a0", culprit="b0", carrier_failed=True)
        while bench.run.phase is RunPhase.COLLECT and "b0" not in bench.run.peers.excluded:
            bench.tick(0.25)
    assert bench.run.peers.excluded == {"b0"}
    assert bench.step().carrier_failures == MAX_CARRIER_FAILURES


def test_the_last_peer_of_a_stage_is_never_excluded() -> None:
    bench = stage_1_has_averaged(closing())
    bench.lose("a0")
    for _ in range(5):
        bench.tick(6.0)
        bench.report("b0", 0, 1)
        assert PeerId("b0") in bench.closing()
        bench.failed("b0")


def test_an_overdue_close_goes_on_without_its_silent_members() -> None:
    bench = closing(limits={"lease_seconds": 20.0})
    for peer in ("a0", "a1", "b1"):
        bench.averaged(peer)
    bench.tick(19.0)
    assert bench.run.phase is RunPhase.CLOSING
    bench.tick(2.0)
    assert bench.run.phase is RunPhase.APPLYING
    assert bench.closing() == ["a0", "a1", "b1"]
    assert {share.peer for share in bench.records(AppliedStep)[0].shares} == {"a0", "b0", "b1"}
    bench.apply_all()
    assert bench.peer("b0").phase is PeerPhase.SYNCING


def test_a_stage_that_is_slow_as_a_whole_is_given_more_time_and_loses_no_member() -> None:
    bench = closing(limits={"lease_seconds": 20.0})
    bench.averaged("a0")
    bench.averaged("b0")
    commands = bench.tick(21.0)
    assert {peer for peer in ALL if bench.sent(peer, AbortRound, commands)} == {"a1", "b1"}
    commands += closed_again(bench, 1.0)
    assert {peer for peer in ALL if bench.sent(peer, Close, commands)} == {"a1", "b1"}
    assert bench.closing() == ["a0", "b0", "a1", "b1"]
    bench.tick(30.0)
    assert bench.run.phase is RunPhase.CLOSING


def test_a_step_has_the_time_for_its_averages_that_the_step_before_needed() -> None:
    bench = closing(limits={"lease_seconds": 20.0})
    bench.tick(21.0)
    closed_again(bench)
    bench.tick(35.0)
    assert bench.run.phase is RunPhase.CLOSING, "of twice the time"
    bench.average_all()
    bench.apply_all()
    bench.fill()
    bench.tick(60.0)
    assert bench.run.phase is RunPhase.CLOSING, "of twice what the step before needed"
    commands = bench.tick(25.0)
    assert {peer for peer in ALL if bench.sent(peer, AbortRound, commands)} == set(ALL)


def test_the_last_member_of_an_average_that_takes_longer_than_a_lease_has_as_long_again() -> None:
    bench = Bench(limits={"lease_seconds": 20.0})
    bench.run.history.averaging_seconds = 100.0
    bench.join_all("a0", "b0", "c0", "a1")
    bench.fill()
    bench.tick(60.0)
    for peer in ("a0", "b0", "a1"):
        bench.averaged(peer)
    bench.tick(50.0)
    assert sorted(bench.closing()) == ["a0", "a1", "b0", "c0"]
    bench.tick(20.0)
    assert sorted(bench.closing()) == ["a0", "a1", "b0"]
    assert bench.run.phase is RunPhase.APPLYING


@pytest.mark.parametrize("named", ["a1", "stranger"])
def test_a_peer_that_keeps_naming_one_that_cannot_be_excluded_is_excluded_itself(
    named: str,
) -> None:
    bench = joined("a0", "b0", "a1")
    bench.fill()
    for _ in range(6):
        if PeerId("b0") not in bench.closing():
            break
        bench.failed("b0", culprit=named)
        bench.tick(6.0)
    assert bench.closing() == ["a0", "a1"]
    bench.average_all()
    assert len(bench.records(AppliedStep)) == 1


@pytest.mark.parametrize("other", [-1, 1])
def test_a_confirmation_of_another_step_ends_no_apply(other: int) -> None:
    bench = Bench.trained(1)
    bench.fill()
    bench.average_all()
    assert bench.run.history.version == 2
    for peer in bench.closing():
        bench.send(peer, Applied(step=Step(2 + other), digest="d", norm=1.0))
    assert bench.run.phase is RunPhase.APPLYING
    assert bench.step().closing.applied == {}
    bench.apply_all()
    assert bench.run.phase is RunPhase.COLLECT


@pytest.mark.parametrize("digest", ["d", "another"])
def test_a_peer_that_confirms_a_step_that_it_was_not_to_apply_holds_nothing(digest: str) -> None:
    bench = Bench.trained(1)
    bench.request("c0", 0, wanted_stage=0)
    bench.save("a0")
    assert bench.sent("c0", AssignStage, bench.save("b0"))
    for peer in ("c0", "a0"):
        assert bench.apply(peer, digest) == []
    assert bench.peer("c0").phase is PeerPhase.SYNCING
    assert bench.peer("a0").phase is PeerPhase.READY
    bench.ready("c0")
    assert bench.peer("c0").phase is PeerPhase.READY


# ---- fingerprints


def third_replica() -> Bench:
    bench = joined("a0", "b0", "c0", "a1")
    bench.fill()
    bench.average_all()
    return bench


def test_a_replica_that_differs_from_the_majority_is_synced_anew() -> None:
    bench = third_replica()
    bench.apply("a1")
    bench.apply("a0", digest="odd", norm=1.5)
    bench.apply("b0")
    commands = bench.apply("c0")
    assert bench.peer("a0").phase is PeerPhase.SYNCING
    assert {p.peer for p in bench.run.peers.ready(0)} == {"b0", "c0"}
    assert any("differed" in note.text for note in bench.commands(Note, commands))


def test_an_unlike_device_may_differ_by_rounding() -> None:
    bench = third_replica()
    bench.apply("a1")
    bench.apply("a0", digest="gpu", norm=1.0 + 1e-7)
    bench.apply("b0")
    bench.apply("c0")
    assert len(bench.run.peers.ready(0)) == 3
