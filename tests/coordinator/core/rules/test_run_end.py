"""Checkpoints, stopping and finishing: nothing is lost, and no peer is kept for long."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from kits.swarm_world.event_bench import SHA, Bench
from kits.swarm_world.facts import train_loss
from swarm_coordinator.core.events import (
    AppliedStep,
    CheckpointFailed,
    CheckpointRecord,
    CloseSession,
    Command,
    EvaluationRecord,
    FetchSnapshot,
    Note,
    Persist,
    ReceiptsVerified,
    Restored,
    RunFinished,
    ShutDown,
    StopRequested,
)
from swarm_coordinator.core.state.peers import PeerPhase
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.status.status_file import encode_document
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Version
from swarm_shared.protocol import (
    AssignStage,
    Goodbye,
    SnapshotFailed,
    SnapshotReady,
    StageRequest,
    Welcome,
)
from swarm_shared.scheduling.placement.stage_sizes import MAX_STATE_HEADER_BYTES

ALL = ("a0", "b0", "a1", "b1")


# ---- checkpoints


def test_a_checkpoint_that_is_due_is_fetched_from_all_who_announce_one_file() -> None:
    bench = Bench.trained(2, checkpoint_steps=2)
    assert bench.savers() == ["a0", "a1", "b0", "b1"]
    assert bench.run.phase is RunPhase.COLLECT
    assert not bench.commands(FetchSnapshot, bench.save("a0")), "b0 may still differ"
    [fetch] = bench.commands(FetchSnapshot, bench.save("b0"))
    assert ([h.peer for h in fetch.holders], fetch.sha256) == (["a0", "b0"], SHA)
    bench.save("a1")
    assert bench.commands(FetchSnapshot, bench.save("b1"))
    bench.one_step()
    bench.stored(2)
    assert bench.records(CheckpointRecord) == [Bench.checkpoint_of(2, 2)]
    assert bench.run.checkpoints.stored == Bench.checkpoint_of(2, 2)


def test_a_pending_checkpoint_is_not_given_up_because_the_next_one_is_due() -> None:
    bench = Bench.trained(2, checkpoint_steps=2)
    for peer in ALL:
        bench.save(peer)
    bench.one_step()
    assert not bench.savers(bench.one_step())
    bench.stored(2)
    assert bench.run.checkpoints.stored == Bench.checkpoint_of(2, 2)


@pytest.mark.parametrize("word", ["the shell's", "the holder's"])
def test_a_checkpoint_that_fails_lets_training_go_on(word: str) -> None:
    bench = Bench.trained(2, checkpoint_steps=2)
    if word == "the shell's":
        bench.event(CheckpointFailed(Version(2), "the disk is full"))
    else:
        for holder in ("a0", "b0"):
            assert bench.run.checkpoints.pending is not None, "one holder is enough"
            bench.send(holder, no_space(2))
    assert bench.run.checkpoints.pending is None
    assert not bench.savers(bench.tick(10.0))
    bench.one_step()
    assert bench.savers(bench.one_step()), "the next one is tried as usual"


def test_a_failed_checkpoint_does_not_delay_the_next_one() -> None:
    bench = Bench.trained(2, checkpoint_steps=2)
    bench.event(CheckpointFailed(Version(2), "the disk is full"))
    bench.one_step()
    assert bench.savers(bench.one_step()) == ["a0", "a1", "b0", "b1"]


def no_space(version: int) -> SnapshotFailed:
    return SnapshotFailed(version=Version(version), stage=StageIndex(0), reason="the disk is full")


@pytest.mark.parametrize("end", ["lost", "fails"])
def test_a_holder_that_is_lost_or_fails_before_it_answers_is_done_without(end: str) -> None:
    bench = Bench.trained(2, checkpoint_steps=2)
    bench.save("b0")
    commands = bench.lose("a0") if end == "lost" else bench.send("a0", no_space(2))
    [fetch] = bench.commands(FetchSnapshot, commands)
    assert [h.peer for h in fetch.holders] == ["b0"]


def test_a_holder_that_has_attached_again_without_a_stage_is_not_fetched_from() -> None:
    bench = Bench.trained(2, names=("a0", "b0", "c0", "a1", "b1"), checkpoint_steps=2)
    bench.save("a0")
    bench.attach("a0")
    [fetch] = bench.commands(FetchSnapshot, bench.save("b0"))
    assert [h.peer for h in fetch.holders] == ["b0"]


def test_holders_that_are_lost_before_any_answers_are_replaced() -> None:
    bench = Bench.trained(2, names=("a0", "a1"), checkpoint_steps=2)
    assert bench.savers(bench.attach("a0", stage=0, version=2)) == ["a0"]
    [fetch] = bench.commands(FetchSnapshot, bench.save("a0"))
    assert [h.peer for h in fetch.holders] == ["a0"]


def test_a_silent_holder_delays_a_checkpoint_for_the_time_of_an_answer_only() -> None:
    bench = Bench.trained(2, checkpoint_steps=2)
    bench.save("a0")
    assert not bench.commands(FetchSnapshot, bench.tick(1.0))
    limit = bench.manifest.limits.lease_seconds
    assert bench.commands(FetchSnapshot, bench.tick(limit))


@pytest.mark.parametrize("other", ["version", "stage", "session"])
def test_a_failure_in_answer_to_another_request_takes_no_file_from_a_checkpoint(other: str) -> None:
    bench = Bench.trained(2, names=("a0", "b0", "a1"), checkpoint_steps=2)
    bench.save("a0")
    if other == "session":
        bench.attach("a0", stage=0, version=2)
    version, stage = Version(1 if other == "version" else 2), StageIndex(7 * (other == "stage"))
    bench.send("a0", SnapshotFailed(version=version, stage=stage, reason="the disk is full"))
    [fetch] = bench.commands(FetchSnapshot, bench.send("b0", no_space(2)))
    assert [h.peer for h in fetch.holders] == ["a0"]


def test_a_holder_without_room_for_another_snapshot_does_not_end_the_fetch_of_its_first() -> None:
    bench = Bench.trained(2, names=("a0", "a1"), checkpoint_steps=2)
    bench.save("a0")
    bench.send("a0", no_space(2))
    bench.save("a1")
    bench.stored(2)
    assert bench.records(CheckpointRecord) == [Bench.checkpoint_of(2, 2)]


def test_a_holder_is_not_asked_for_a_version_that_it_no_longer_has() -> None:
    bench = Bench.trained(2, names=("a0", "b0", "a1"), checkpoint_steps=2)
    bench.one_step()
    bench.lose("a0")
    assert not bench.savers(bench.attach("b0", stage=0, version=3))
    assert bench.run.checkpoints.pending is None


def three_holders() -> Bench:
    names = ("a0", "b0", "c0", "a1")
    return Bench.trained(2, names=names, checkpoint_steps=2)


@pytest.mark.parametrize("order", list(itertools.permutations(("a0", "b0", "c0"))))
def test_one_holder_of_three_that_was_like_the_others_puts_no_other_state_into_the_checkpoint(
    order: tuple[str, ...],
) -> None:
    """It is flagged and synced anew, unless it comes after the decision."""
    bench = three_holders()
    log: list[Command] = []
    for holder in order:
        log += bench.save(holder, "b" * 64 if holder == "a0" else SHA)
    [fetch] = bench.commands(FetchSnapshot, log)
    assert (fetch.sha256, [h.peer for h in fetch.holders]) == (SHA, ["b0", "c0"])
    if order[-1] != "a0":
        assert bench.peer("a0").phase is PeerPhase.SYNCING
        assert list(bench.run.statistics.flags) == ["a0"]
    assert bench.peer("b0").phase is PeerPhase.READY


@pytest.mark.parametrize("since", ["has attached again", "holds another stage"])
def test_a_holder_is_not_synced_anew_for_a_file_that_it_saved_before_it(since: str) -> None:
    bench = three_holders()
    bench.save("a0", "b" * 64)
    if since == "has attached again":
        bench.attach("a0", stage=0, version=2)
        bench.tick(1.0)
    else:
        bench.prepare_move("a0", 1)
    bench.one_step()
    saved = SnapshotReady(
        version=2, stage=0, item="item-0", bytes=bench.state_bytes(0), sha256=SHA
    )  # fmt: skip
    bench.send("b0", saved)
    [fetch] = bench.commands(FetchSnapshot, bench.send("c0", saved))
    assert (fetch.sha256, [h.peer for h in fetch.holders]) == (SHA, ["b0", "c0"])
    assert bench.peer("a0").stage == (0 if since == "has attached again" else 1)
    assert bench.peer("a0").phase is PeerPhase.READY
    assert not bench.run.statistics.flags


def test_of_two_that_differ_the_one_that_was_there_first_is_the_source() -> None:
    bench = Bench(checkpoint_steps=2)
    bench.sessions["b0"] = 9
    bench.join_all(*ALL)
    bench.one_step()
    bench.one_step()
    bench.save("b0", "b" * 64)
    [fetch] = bench.commands(FetchSnapshot, bench.save("a0"))
    assert (fetch.sha256, [h.peer for h in fetch.holders]) == (SHA, ["a0"])


@pytest.mark.parametrize("surplus", [-1, MAX_STATE_HEADER_BYTES + 1])
def test_a_snapshot_that_is_not_as_large_as_the_stage_is_no_source(surplus: int) -> None:
    bench = Bench.trained(2, names=("a0", "a1"), checkpoint_steps=2)
    size = bench.state_bytes(0) + surplus
    saved = SnapshotReady(version=2, stage=0, item="item-0", bytes=size, sha256=SHA)
    assert not bench.commands(FetchSnapshot, bench.send("a0", saved))
    assert list(bench.run.statistics.flags) == ["a0"]
    assert not bench.savers(), "its next one would be as wrong"
    assert bench.run.checkpoints.pending is None


def test_a_checkpoint_whose_holder_died_with_the_only_copy_is_given_up() -> None:
    bench = Bench.trained(2, names=("a0", "a1"), checkpoint_steps=2)
    bench.lose("a0")
    assert bench.run.checkpoints.pending is None


def test_a_checkpoint_of_an_abandoned_history_is_never_recorded() -> None:
    bench = Bench.trained(2, names=("a0", "a1"), checkpoint_steps=2)
    bench.save("a0")
    bench.save("a1")
    bench.lose("a1")
    bench.join("c1", 1)
    bench.tick(11.0)
    assert bench.roll_backs() == [0]
    [note] = bench.commands(Note, bench.stored(2))
    assert note.text == "a checkpoint of step 2 was stored too late and is not used"
    assert not bench.records(CheckpointRecord)
    assert bench.run.checkpoints.stored is None


def test_files_that_are_not_the_ones_asked_for_are_no_checkpoint() -> None:
    bench = Bench.trained(2, checkpoint_steps=2)
    bench.save("a0")
    bench.save("a1")
    bench.stored(2, sha="b" * 64)
    assert not bench.records(CheckpointRecord)


# ---- the end of the run


def test_the_run_ends_with_evaluation_checkpoint_record_and_goodbye() -> None:
    bench = Bench.trained(1, names=("a0", "a1"), steps=1, evaluation=2)
    assert bench.run.phase is RunPhase.EVALUATING
    leased = {(m.microbatch, m.accumulate) for _, m in bench.leased()}
    assert leased == {(2, (0, 1)), (3, (0, 1))}
    bench.report("a0", 2, 3)
    assert not bench.records(EvaluationRecord)
    for microbatch, loss in {2: 6.0, 3: 10.0}.items():
        receipt = bench.receipt("a1", microbatch, loss_sum=loss)
        bench.event(ReceiptsVerified(bench.session("a1"), PeerId("a1"), (receipt,)))
    assert bench.records(EvaluationRecord) == [EvaluationRecord(Version(1), 2.0, 8)]
    commands = bench.checkpoint()
    records = [type(c.record) for c in bench.commands(Persist, commands)]
    assert records == [CheckpointRecord, RunFinished]
    assert bench.sent("a0", Goodbye, commands)[0].finished
    assert [c.peer for c in bench.commands(CloseSession, commands)] == ["a0", "a1"]
    assert isinstance(commands[-1], ShutDown)
    assert bench.run.phase is RunPhase.FINISHED
    assert not bench.tick(5.0)


def test_an_evaluation_that_failed_is_leased_again() -> None:
    bench = Bench.trained(1, names=("a0", "a1"), steps=1, evaluation=1)
    state = bench.step().leases[MicrobatchIndex(2)]
    bench.resolve(state.trainer, 2, state.lease, ok=False, reason="gone")
    bench.tick(1.5)
    assert bench.step().leases[MicrobatchIndex(2)].lease > state.lease


def test_a_held_out_loss_is_of_receipts_that_no_training_step_takes() -> None:
    bench = Bench.trained(1, names=("a0", "a1"), steps=2, evaluation=1)
    bench.report("a1", 2)
    assert not bench.step().table
    bench.one_step()
    assert bench.run.phase is RunPhase.EVALUATING
    bench.report("a1", 0)
    assert not bench.step().table
    bench.fill()
    assert bench.records(EvaluationRecord) == [
        EvaluationRecord(Version(2), train_loss(3, 2) / 4, 4)
    ]


def test_under_staleness_the_evaluation_is_the_step_that_has_the_newest_parameters() -> None:
    bench = Bench.trained(0, names=("a0", "a1"), steps=1, evaluation=1, staleness=1)
    bench.one_step()
    assert bench.run.phase is RunPhase.EVALUATING
    assert bench.step().step == 3


def test_a_restarted_coordinator_takes_the_receipts_of_the_evaluation_again() -> None:
    bench = Bench.restarted(1, steps=1, evaluation=1)
    for peer in ("a0", "a1"):
        receipt = bench.receipt(peer, 2, stage=int(peer[1]))
        bench.attach(peer, (receipt,), stage=int(peer[1]), version=1)
    bench.tick(20.0)
    assert [record.version for record in bench.records(EvaluationRecord)] == [1]


def test_the_last_checkpoint_is_tried_again_with_another_holder() -> None:
    names = ("a0", "b0", "c0", "d0", "a1")
    bench = Bench.trained(1, names=names, steps=1)
    assert bench.savers() == ["a0", "a1", "b0", "c0"]
    bench.event(CheckpointFailed(Version(1), "the disk is full"))
    assert bench.savers(bench.tick(6.0)) == ["a1", "b0", "c0", "d0"]
    for peer in ("b0", "c0", "d0", "a1"):
        bench.save(peer)
    bench.stored(1)
    assert bench.records(RunFinished) == [RunFinished(Version(1))]


def test_a_run_whose_last_checkpoint_cannot_be_stored_ends_and_is_not_called_finished() -> None:
    bench = Bench.trained(1, names=("a0", "a1"), steps=1)
    for _ in range(100):
        if bench.run.phase is RunPhase.FINISHED:
            break
        bench.event(CheckpointFailed(Version(1), "the disk is full"))
        bench.tick(6.0)
    assert bench.run.phase is RunPhase.FINISHED
    assert not bench.records(RunFinished)
    assert bench.commands(ShutDown, bench.log)


def test_a_stage_that_is_lost_during_the_evaluation_does_not_stop_the_run() -> None:
    bench = Bench.trained(2, names=("a0", "a1"), steps=2, evaluation=1)
    assert bench.run.phase is RunPhase.EVALUATING
    bench.lose("a1")
    bench.request("c1", 1, wanted_stage=1)
    commands = bench.tick(11.0)
    assert bench.roll_backs(commands) == [0]
    assert bench.sent("c1", AssignStage, commands)
    for peer in ("a0", "c1"):
        bench.ready(peer)
    assert bench.run.phase is RunPhase.COLLECT


def test_after_a_roll_back_behind_the_evaluation_the_run_is_evaluated_again() -> None:
    bench = Bench.trained(1, names=("a0", "a1"), steps=1, evaluation=1)
    bench.fill()
    assert bench.run.history.heldout_loss == train_loss(2, 2) / 4
    bench.lose("a1")
    bench.join("c1", 1)
    bench.tick(11.0)
    for peer in ("a0", "c1"):
        bench.ready(peer)
    bench.one_step()
    assert bench.run.phase is RunPhase.EVALUATING


def test_a_run_that_is_finished_at_the_start_answers_clients_until_it_is_stopped() -> None:
    last = Bench.applied_step(1, 7)
    restored = Restored(2, Version(1), last, Bench.checkpoint_of(2, 1), True, 2.0)
    bench = Bench(restored, steps=1, evaluation=1)
    assert bench.tick(3600.0) == []
    bench.attach("a0", stage=0, version=1)
    [welcome], [goodbye] = bench.sent("a0", Welcome), bench.sent("a0", Goodbye)
    assert (welcome.finished, welcome.certificate) == (True, "cert")
    assert goodbye.finished
    assert goodbye.reason == "the run has finished after 1 steps; nothing is left to compute"
    assert isinstance(bench.last[-1], CloseSession)
    assert bench.send("a0", StageRequest(stage=StageIndex(0))) == []
    assert bench.lose("a0") == []
    assert bench.event(StopRequested()) == [ShutDown()]


def test_a_run_whose_steps_were_raised_goes_on_and_is_evaluated_at_its_new_end() -> None:
    last = Bench.applied_step(1, 7)
    restored = Restored(2, Version(1), last, Bench.checkpoint_of(2, 1), False, 2.0)
    bench = Bench(restored, steps=2, evaluation=1)
    for peer in ("a0", "a1"):
        bench.attach(peer, stage=int(peer[1]), version=1)
    bench.one_step()
    assert bench.run.phase is RunPhase.EVALUATING


# ---- Ctrl-C at the coordinator


def test_a_stop_in_mid_step_writes_a_checkpoint_of_the_version_and_says_goodbye() -> None:
    bench = Bench.trained(1)
    bench.report("a0", 0)
    commands = bench.event(StopRequested())
    assert bench.savers(commands) == ["a0", "a1", "b0", "b1"]
    commands = bench.checkpoint()
    assert bench.records(CheckpointRecord, commands) == [Bench.checkpoint_of(2, 1)]
    assert all(not m.finished for p in ALL for m in bench.sent(p, Goodbye, commands))
    assert isinstance(commands[-1], ShutDown)
    assert not bench.tick(5.0)


def test_a_stop_in_a_close_lets_the_step_end_first() -> None:
    bench = Bench.trained(1)
    bench.fill()
    bench.event(StopRequested())
    assert bench.run.phase is RunPhase.CLOSING
    bench.average_all()
    bench.apply_all()
    assert bench.run.history.version == 2
    commands = bench.checkpoint()
    assert bench.records(CheckpointRecord, commands) == [Bench.checkpoint_of(2, 2)]
    assert isinstance(commands[-1], ShutDown)


def test_a_stop_without_peers_ends_at_once() -> None:
    bench = Bench.restarted(3)
    assert isinstance(bench.event(StopRequested())[-1], ShutDown)


def test_a_stop_waits_for_a_bounded_time() -> None:
    bench = Bench.trained(1)
    bench.event(StopRequested())
    assert not bench.commands(ShutDown, bench.tick(29.0))
    assert bench.commands(ShutDown, bench.tick(2.0))


def test_a_stop_waits_for_the_next_try_of_a_checkpoint_that_failed() -> None:
    bench = Bench.trained(1)
    bench.event(StopRequested())
    bench.event(CheckpointFailed(Version(1), "the disk is full"))
    assert not bench.commands(ShutDown, bench.tick(4.0))
    assert bench.savers(bench.tick(2.0)) == ["a0", "a1", "b0", "b1"]
    commands = bench.checkpoint()
    assert bench.records(CheckpointRecord, commands) == [Bench.checkpoint_of(2, 1)]
    assert isinstance(commands[-1], ShutDown)


def test_a_second_stop_changes_nothing() -> None:
    bench = Bench.trained(1)
    bench.event(StopRequested())
    bench.now += 20.0
    bench.event(StopRequested())
    assert bench.commands(ShutDown, bench.tick(11.0))


# ---- the status


def test_the_status_document_is_complete_in_every_phase() -> None:
    bench = Bench(steps=1)
    phases = set()

    def look() -> dict[str, Any]:
        status = bench.status()
        phases.add(status.phase)
        assert json.loads(encode_document(status)) == status.model_dump(mode="json")
        return status.model_dump(mode="json")

    assert look()["waiting_for"] == ""
    bench.join_all(*ALL)
    bench.report("a0", 0)
    status = look()
    assert (status["cells_done"], status["cells_total"]) == (1, 4)
    assert status["health"]["state"] == "healthy"
    assert status["stages"] == [
        {"stage": stage, "peers": 2, "microbatches_per_second": 0.0} for stage in (0, 1)
    ]
    bench.fill()
    look()
    bench.average_all()
    look()
    bench.apply_all()
    status = look()
    assert status["loss"] == bench.records(AppliedStep)[0].loss
    assert status["version"] == 1
    bench.checkpoint()
    assert look()["peers"] == []
    assert len(phases) == 5
