"""Membership and stages: attaching, syncing, losing and returning peers."""

from __future__ import annotations

import pytest

from kits.memory import offers
from kits.swarm_world.event_bench import COORDINATOR, SHA, Bench, joined
from swarm_coordinator.core.events import (
    AppliedStep,
    CloseSession,
    Command,
    HeartbeatsReceived,
    MessageReceived,
    Note,
    PeerHeartbeat,
    Send,
    SessionNumber,
)
from swarm_coordinator.core.rules import membership, roster
from swarm_coordinator.core.rules.snapshots import SNAPSHOT_HOLDERS
from swarm_coordinator.core.state.peers import PeerPhase
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.status.builder import peer_row
from swarm_shared.base.types import PeerId, StageIndex, Step, Version
from swarm_shared.protocol import (
    AbortRound,
    AddressUpdate,
    Applied,
    Apply,
    AssignStage,
    CarrierAddress,
    Heartbeat,
    Leaving,
    Reachability,
    Ready,
    Refused,
    Roster,
    SaveSnapshot,
    SnapshotFailed,
    StageRequest,
    SyncFailed,
    Welcome,
)
from swarm_shared.run.manifest import InitialState
from swarm_shared.run.model_config import AdapterConfig


def kinds(commands: list[Command], peer: str) -> list[str]:
    return [c.message.kind for c in commands if isinstance(c, Send) and c.peer == peer]


def training() -> Bench:
    """Two peers a stage, one step done, the second being collected."""
    bench = joined("a0", "b0", "a1", "b1", limits={"join_hold_seconds": 5.0})
    bench.one_step()
    assert bench.run.history.version == 1
    assert bench.run.phase is RunPhase.COLLECT
    return bench


# ---- joining


def test_a_joining_peer_is_welcomed_and_gets_the_stage_that_it_requests() -> None:
    bench = Bench()
    bench.attach("a")
    [welcome] = bench.sent("a", Welcome)
    assert not welcome.keep
    assert welcome.generation == 1
    assert [row.peers for row in welcome.stages] == [0, 0]
    bench.send("a", StageRequest(stage=StageIndex(0)))
    [assigned] = bench.sent("a", AssignStage)
    assert (assigned.stage, assigned.version, assigned.source) == (0, 0, "fresh")


def test_version_0_of_a_run_with_a_beginning_comes_from_the_organisers_folder() -> None:
    bench = Bench()
    initial = (InitialState(bytes=70, sha256="a" * 64), InitialState(bytes=80, sha256="b" * 64))
    bench.run.manifest = bench.run.manifest.model_copy(update={"initial": initial})
    bench.request("a", 0)
    [assigned] = bench.sent("a", AssignStage)
    assert (assigned.source, assigned.item) == ("snapshot", "initial/0")
    assert (assigned.bytes, assigned.sha256) == (70, "a" * 64)
    assert [holder.peer for holder in assigned.holders] == [COORDINATOR.peer]


def test_version_0_of_adapters_comes_from_the_seed() -> None:
    bench = Bench()
    initial = (InitialState(bytes=70, sha256="a" * 64), InitialState(bytes=80, sha256="b" * 64))
    model = bench.run.manifest.model.model_copy(update={"adapters": AdapterConfig(rank=2)})
    bench.run.manifest = bench.run.manifest.model_copy(update={"initial": initial, "model": model})
    bench.request("a", 0)
    [assigned] = bench.sent("a", AssignStage)
    assert (assigned.version, assigned.source, assigned.item) == (0, "fresh", "")


def test_of_two_joining_peers_that_choose_the_same_stage_one_is_corrected() -> None:
    bench = Bench()
    bench.attach("a")
    bench.attach("b")
    bench.send("a", StageRequest(stage=StageIndex(0)))
    bench.send("b", StageRequest(stage=StageIndex(0)))
    assert bench.sent("b", AssignStage)[0].stage == 1


@pytest.mark.parametrize(("microbatches_sent", "stage"), [(0.0, 1), (0.5, 2), (10.0, 1)])
def test_a_joining_peers_uplink_chooses_among_equally_slow_stages(
    microbatches_sent: float, stage: int
) -> None:
    """Stages 1 and 2 have one peer each; for a microbatch, 1 sends two tensors and 2 one."""
    bench = Bench(stages=3)
    for peer, held in (("a", 0), ("b", 0), ("c", 1), ("d", 2)):
        bench.join(peer, held)
        bench.send(peer, Heartbeat(microbatches_per_second=1.0))
    ends, middle = (bench.run.peers.stage_rows()[at].sent_bytes for at in (2, 1))
    assert middle == 2 * ends > 0
    bench.attach("new")
    up = microbatches_sent * middle
    bench.send("new", StageRequest(stage=StageIndex(stage), up_bytes_per_second=up))
    assert bench.sent("new", AssignStage)[0].stage == stage


def test_of_deserted_stages_a_peer_with_a_slow_uplink_takes_an_end() -> None:
    bench = Bench(stages=3)
    bench.join("a", 0)
    bench.send("a", Heartbeat(microbatches_per_second=1.0))
    bench.attach("new")
    bench.send("new", StageRequest(stage=StageIndex(2), up_bytes_per_second=1.0))
    assert bench.sent("new", AssignStage)[0].stage == 2


@pytest.mark.parametrize("chosen", [None, 1], ids=["any stage", "the stage that it wants"])
def test_a_machine_that_is_too_small_for_a_stage_is_refused(chosen: int | None) -> None:
    bench = Bench()
    bench.request("small", chosen or 0, memory=offers(99), wanted_stage=chosen)
    [refused] = bench.sent("small", Refused)
    assert refused.code == "capacity"
    assert "offers" in refused.reason
    assert [c.peer for c in bench.commands(CloseSession)] == ["small"]
    assert any(note.text.endswith(refused.reason) for note in bench.commands(Note))
    assert not bench.run.peers


def test_a_peer_gets_the_stage_that_its_volunteer_chose_though_another_has_no_peer() -> None:
    bench = joined("a0")
    bench.request("b0", 1, wanted_stage=0)
    assert bench.peer("b0").stage == 0
    (note,) = (one.text for one in bench.commands(Note) if "takes stage" in one.text)
    assert note.endswith("takes stage 0: the volunteer chose this stage")


@pytest.mark.parametrize("stage", [2, 500])
def test_a_stage_that_does_not_exist_is_refused(stage: int) -> None:
    bench = Bench()
    bench.request("a", stage, wanted_stage=stage)
    assert "stages 0 to 1" in bench.sent("a", Refused)[0].reason


def test_rosters_come_before_the_work_that_relies_on_them() -> None:
    bench = Bench()
    bench.join("a0", 0)
    bench.request("a1", 1, wanted_stage=1)
    commands = bench.ready("a1")
    assert kinds(commands, "a0") == ["roster", "lease"]
    assert {p.peer for p in bench.sent("a0", Roster)[0].peers} == {"a0", "a1"}


def test_a_peer_that_joins_in_mid_run_gets_its_stage_from_the_replicas() -> None:
    bench = training()
    bench.request("c0", 0, wanted_stage=0)
    assert bench.sent("a0", SaveSnapshot) == [SaveSnapshot(version=1, stage=0)]
    assert bench.sent("b0", SaveSnapshot) == [SaveSnapshot(version=1, stage=0)]
    bench.save("a0")
    assert not bench.sent("c0", AssignStage), "both can serve, so the second is waited for"
    bench.save("b0")
    [assigned] = bench.sent("c0", AssignStage)
    assert (assigned.source, assigned.version, assigned.sha256) == ("snapshot", 1, SHA)
    assert [h.peer for h in assigned.holders] == ["a0", "b0"]
    bench.ready("c0")
    assert PeerId("c0") in [p.peer for p in bench.run.peers.ready(0)]


def test_others_are_asked_for_a_snapshot_when_those_that_were_asked_have_left() -> None:
    holders = ["a0", "b0", "c0", "d0", "e0"]
    bench = joined(*holders, "a1", limits={"join_hold_seconds": 5.0})
    bench.one_step()
    bench.request("f0", 0, wanted_stage=0)
    asked = [peer for peer in holders if bench.sent(peer, SaveSnapshot, bench.log)]
    assert len(asked) == SNAPSHOT_HOLDERS
    for peer in asked:
        bench.lose(peer)
    bench.tick(0.25)
    left = [peer for peer in holders if peer not in asked]
    assert [peer for peer in left if bench.sent(peer, SaveSnapshot, bench.log)] == left


@pytest.mark.parametrize("change", ["excluded", "at another stage"])
def test_a_peer_that_no_longer_holds_the_stage_is_no_source_of_its_snapshot(change: str) -> None:
    bench = training()
    bench.request("c0", 0, wanted_stage=0)
    bench.save("a0")
    if change == "excluded":
        bench.run.peers.exclude(bench.peer("a0"))
    else:
        bench.lose("a0")
        bench.request("a0", 1, wanted_stage=1)
        for holder in ("a1", "b1"):
            bench.save(holder)
        bench.ready("a0")
        assert bench.peer("a0").phase is PeerPhase.READY
    bench.save("b0")
    bench.tick(3.0)
    [assigned] = bench.sent("c0", AssignStage, bench.log)
    assert [holder.peer for holder in assigned.holders] == ["b0"]


def test_a_holder_that_does_not_answer_delays_a_joining_peer_for_two_seconds_only() -> None:
    bench = training()
    bench.request("c0", 0, wanted_stage=0)
    bench.save("a0")
    assert not bench.sent("c0", AssignStage)
    [assigned] = bench.sent("c0", AssignStage, bench.tick(2.0))
    assert [h.peer for h in assigned.holders] == ["a0"]


def test_a_holder_that_saves_a_little_later_than_the_first_is_a_source_too() -> None:
    """Saving a large stage takes all holders about as long, and longer than two seconds."""
    bench = training()
    bench.request("c0", 0, wanted_stage=0)
    bench.tick(8.0)
    bench.save("a0")
    assert not bench.sent("c0", AssignStage)
    bench.tick(1.0)
    bench.save("b0")
    [assigned] = bench.sent("c0", AssignStage)
    assert [h.peer for h in assigned.holders] == ["a0", "b0"]


def waiting_for_stage_0(*newcomers: str) -> Bench:
    """Peers that joined in this order; a0 alone has saved the stage's state."""
    bench = training()
    for newcomer in newcomers:
        bench.request(newcomer, 0, wanted_stage=0)
    bench.save("a0")
    return bench


def told(commands: list[Command], *newcomers: str) -> list[str]:
    return [newcomer for newcomer in newcomers if "assign_stage" in kinds(commands, newcomer)]


def test_one_source_serves_one_joining_peer_after_the_other() -> None:
    bench = waiting_for_stage_0("c0", "d0", "e0")
    assert told(bench.tick(2.0), "c0", "d0", "e0") == ["c0"]
    assert told(bench.tick(5.0), "d0", "e0") == []
    assert told(bench.ready("c0"), "d0", "e0") == ["d0"]
    assert told(bench.lose("d0"), "e0") == ["e0"]


def test_two_sources_give_a_stage_to_two_at_once() -> None:
    bench = waiting_for_stage_0("c0", "d0", "e0")
    assert told(bench.save("b0"), "c0", "d0", "e0") == ["c0", "d0"]


def test_a_joining_peer_that_failed_to_finish_goes_last_the_next_time() -> None:
    bench = waiting_for_stage_0("c0", "d0")
    assert told(bench.tick(2.0), "c0", "d0") == ["c0"]
    bench.fill()
    bench.tick(bench.manifest.limits.join_hold_seconds + 1.0)
    bench.average_all()
    bench.apply_all()
    assert bench.run.history.version == 2
    bench.tick()
    bench.save("a0")
    assert told(bench.tick(2.0), "c0", "d0") == ["d0"]


def test_holders_that_cannot_save_are_asked_again_later() -> None:
    bench = training()
    bench.request("c0", 0, wanted_stage=0)
    for holder in ("a0", "b0"):
        failed = SnapshotFailed(version=Version(1), stage=StageIndex(0), reason="disk full")
        assert not bench.sent(holder, SaveSnapshot, bench.send(holder, failed))
    assert bench.sent("a0", SaveSnapshot, bench.tick(16.0))


def test_the_majority_s_file_is_the_one_to_fetch_and_only_its_holders_are_named() -> None:
    bench = training()
    bench.join("c0", 0)
    for holder in ("a0", "b0"):
        bench.save(holder)
    bench.ready("c0")
    bench.attach("d0", wanted_stage=0)
    bench.run.checkpoints.snapshots.clear()
    bench.send("d0", StageRequest(stage=StageIndex(0)))
    bench.save("a0")
    bench.save("c0")
    bench.save("b0", sha="b" * 64)
    [assigned] = bench.sent("d0", AssignStage)
    assert assigned.sha256 == SHA
    assert [h.peer for h in assigned.holders] == ["a0", "c0"]


def test_a_joining_peer_gets_its_stage_from_a_checkpoint_of_the_run_s_version() -> None:
    bench = Bench.restarted(3, checkpoint=3)
    bench.request("a", 1, wanted_stage=1)
    [assigned] = bench.sent("a", AssignStage)
    assert (assigned.item, assigned.version) == ("checkpoint/3/1", 3)
    assert [h.peer for h in assigned.holders] == ["coordinator"]


def test_the_close_waits_for_a_download_for_a_bounded_time() -> None:
    bench = training()
    bench.request("c0", 0, wanted_stage=0)
    bench.fill()
    assert bench.run.phase is RunPhase.COLLECT
    bench.tick(5.5)
    assert bench.run.phase is RunPhase.CLOSING
    assert PeerId("c0") not in bench.closing()


def test_a_download_that_the_step_does_not_wait_for_starts_over_with_the_next_version() -> None:
    bench = training()
    bench.request("c0", 0, wanted_stage=0)
    bench.save("a0")
    bench.save("b0")
    bench.fill()
    bench.tick(5.5)
    bench.average_all()
    bench.apply_all()
    assert bench.run.history.version == 2
    # At once, so that most of the step's time is left for it.
    assert bench.sent("a0", SaveSnapshot) == [SaveSnapshot(version=2, stage=0)]
    bench.send("c0", Ready(stage=0, version=1, digest="d"))
    assert bench.peer("c0").phase is PeerPhase.SYNCING


def test_a_download_that_ends_during_the_close_starts_over_after_it() -> None:
    bench = training()
    bench.request("c0", 0, wanted_stage=0)
    bench.save("a0")
    bench.save("b0")
    bench.fill()
    bench.tick(5.5)
    assert bench.run.phase is RunPhase.CLOSING
    bench.ready("c0")
    assert bench.peer("c0").phase is PeerPhase.SYNCING
    bench.failed("a0")
    assert bench.run.phase is RunPhase.COLLECT
    assert bench.sent("c0", AssignStage)[0].version == 1, "it is told so at once"


def test_a_source_that_failed_is_not_named_again_at_once() -> None:
    bench = Bench.restarted(3, checkpoint=3)
    bench.request("a", 1, wanted_stage=1)
    failed = SyncFailed(stage=StageIndex(1), version=Version(3), reason="hash")
    assert not bench.sent("a", AssignStage, bench.send("a", failed))
    assert len(bench.sent("a", AssignStage, bench.tick(2.0))) == 1


# ---- loss and return


def test_a_silent_peer_is_dropped_and_only_what_it_held_is_leased_again() -> None:
    bench = training()
    bench.report("a0", 0)
    bench.report("b0", 1)
    bench.report("a1", 0, 1)
    assert bench.run.phase is RunPhase.CLOSING
    commands = bench.tick(5.5, silent=("b0",))
    assert [c.peer for c in bench.commands(CloseSession, commands)] == ["b0"]
    assert bench.sent("a0", AbortRound, commands)
    commands += bench.tick(1.0)
    assert [(m.microbatch, m.accumulate) for _, m in bench.leased(commands)] == [(1, (0,))]


def test_a_large_run_assigns_the_longest_heartbeat_interval_that_detects_a_death_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = training()
    limits = bench.run.manifest.limits
    assert bench.sent("c0", Welcome, bench.attach("c0"))[0].heartbeat_seconds == (
        limits.heartbeat_seconds
    )
    monkeypatch.setattr(roster, "SLOW_HEARTBEAT_PEERS", 2)
    [welcome] = bench.sent("c1", Welcome, bench.attach("c1"))
    assert welcome.heartbeat_seconds is not None
    assert limits.heartbeat_seconds < welcome.heartbeat_seconds
    assert 2 * welcome.heartbeat_seconds < limits.dead_after_seconds


def test_messages_of_an_older_session_are_ignored() -> None:
    bench = training()
    bench.attach("b0", stage=0, version=1)
    bench.now += 100.0
    beat = Heartbeat(microbatches_per_second=9.0, queued=0)
    bench.event(HeartbeatsReceived((PeerHeartbeat(SessionNumber(1), PeerId("b0"), beat),)))
    bench.event(MessageReceived(SessionNumber(1), PeerId("b0"), Leaving()))
    assert not bench.peer("b0").leaving
    assert bench.peer("b0").rates.microbatches_per_second == 0.0
    assert bench.peer("b0").last_heard < bench.now


def test_a_class_of_arithmetic_is_kept_as_long_as_its_session_and_changes_nothing_else() -> None:
    bench = training()
    told = bench.run.peers[PeerId("b0")]
    before = bench.run.peers.roster()[0]
    assert (told.arithmetic, peer_row(bench.run, told, bench.now).arithmetic) == ("", "")
    assert bench.send("b0", Heartbeat(arithmetic="5e0f1a2b")) == []
    bench.send("b0", Heartbeat())
    assert peer_row(bench.run, told, bench.now).arithmetic == "5e0f1a2b"
    bench.send("b0", Heartbeat(arithmetic="00000000"))
    assert told.arithmetic == "00000000"
    assert bench.run.peers.roster()[0] == before
    bench.attach("b0", stage=0, version=1)
    assert bench.run.peers[PeerId("b0")].arithmetic == ""


def test_a_member_is_admitted_by_the_p2pd_id_that_it_reports_while_it_is_attached() -> None:
    bench = training()
    peers = bench.run.peers
    assert peers.admits(PeerId("p2pd-b0"))
    assert peers.admits(PeerId("b0"))
    assert not peers.admits(PeerId("p2pd-nobody"))

    def moves_to(peer: str, carrier: str | None) -> None:
        address = CarrierAddress(peer=carrier, addresses=(), binding="b") if carrier else None
        bench.send(
            peer,
            AddressUpdate(
                addresses=(), carrier=address, reachability=Reachability.UNKNOWN,
                offers_relay=False,
            ),
        )  # fmt: skip

    moves_to("b0", "another")
    assert not peers.admits(PeerId("p2pd-b0"))
    moves_to("a0", "another")
    bench.lose("b0")
    assert peers.admits(PeerId("another")), "two have said that it is theirs"
    moves_to("a0", None)
    assert not peers.admits(PeerId("another"))


def test_a_peer_that_attaches_again_is_not_its_own_dht_entry_point() -> None:
    bench = training()
    bench.lose("b0")
    bench.attach("b0", stage=0, version=1)
    entrances = bench.sent("b0", Welcome)[-1].directory
    carriers = {entrance.rpartition("/p2p/")[2] for entrance in entrances}
    assert carriers == {"p2pd-a0", "p2pd-a1", "p2pd-b1"}


def test_a_peer_that_only_lost_its_link_keeps_its_stage_and_its_part_of_the_step() -> None:
    bench = training()
    bench.report("b0", 1)
    receipts = (bench.receipt("b0", 0), bench.receipt("b0", 1), bench.receipt("a0", 1))
    bench.lose("b0")
    assert not bench.step().table
    bench.attach("b0", receipts[:2], stage=0, version=1)
    assert bench.sent("b0", Welcome)[0].keep
    found = {cell: held.peer for cell, held in bench.step().table.items()}
    assert found == {(0, 0): "b0", (1, 0): "b0"}


def test_receipts_of_others_in_a_hello_do_not_count() -> None:
    bench = training()
    stolen = bench.receipt("a0", 0)
    bench.attach("b0", (stolen,), stage=0, version=1)
    assert not bench.step().table


def test_receipts_reported_while_the_run_waits_after_a_restart_count_when_the_step_begins() -> None:
    bench = Bench.restarted(3)
    receipts = tuple(bench.receipt("a0", m, stage=0) for m in (0, 1))
    bench.attach("a0", receipts, stage=0, version=3)
    assert bench.run.phase is RunPhase.WAITING
    commands = bench.attach("a1", stage=1, version=3)
    assert bench.run.phase is RunPhase.COLLECT
    masks = {m.microbatch: m.accumulate for _, m in bench.leased(commands)}
    assert masks == {0: (1,), 1: (1,)}


def test_a_peer_that_missed_the_apply_receives_it_when_it_returns() -> None:
    bench = Bench.restarted(3, attempt=7)
    commands = bench.attach("a0", stage=0, version=2, averaged_attempt=7)
    assert kinds(commands, "a0") == ["welcome", "apply"]
    assert bench.sent("a0", Welcome)[0].keep
    [apply] = bench.sent("a0", Apply)
    assert (apply.step, apply.attempt, apply.global_norm, apply.learning_rate) == (3, 7, 3.0, 0.1)
    assert any("still has to apply step 3" in note.text for note in bench.commands(Note, commands))
    bench.attach("a1", stage=1, version=3)
    assert bench.run.phase is RunPhase.WAITING
    bench.send("a0", Applied(step=Step(3), digest="d", norm=1.0))
    assert bench.run.phase is RunPhase.COLLECT


def test_a_peer_that_has_yet_to_apply_the_last_step_is_waited_for_and_downloads_nothing() -> None:
    bench = Bench.restarted(3, attempt=7, checkpoint=3)
    for peer, stage in (("b0", 0), ("a1", 1)):
        bench.attach(peer, stage=stage, version=3)
    bench.attach("a0", stage=0, version=2, averaged_attempt=7)
    bench.fill()
    bench.tick(1.0)
    assert bench.closing() == ["a1"]
    bench.send("a0", Applied(step=Step(3), digest="d", norm=1.0))
    bench.tick(1.0)
    assert bench.closing() == ["a0", "b0", "a1"]
    assert not bench.sent("a0", AssignStage, bench.log)


def test_receipts_of_a_peer_that_missed_the_apply_count_although_the_step_began_without_it() -> (
    None
):
    bench = Bench.restarted(3, attempt=7, staleness=1)
    ahead, stolen = bench.receipt("a0", 1, stage=0), bench.receipt("b0", 0, stage=0)
    bench.attach("a0", (ahead, stolen), stage=0, version=2, averaged_attempt=7)
    for peer, stage in (("b0", 0), ("a1", 1)):
        bench.attach(peer, stage=stage, version=3)
    assert bench.run.phase is RunPhase.COLLECT
    assert not bench.step().table
    bench.send("a0", Applied(step=Step(3), digest="d", norm=1.0))
    assert {cell: held.peer for cell, held in bench.step().table.items()} == {(1, 0): "a0"}


@pytest.mark.parametrize(
    "hello", [{"averaged_attempt": 6}, {}, {"averaged_attempt": 7, "stage": 9}]
)
def test_a_peer_that_did_not_average_the_applied_attempt_joins_anew(
    hello: dict[str, int],
) -> None:
    bench = Bench.restarted(3, attempt=7)
    bench.attach("a0", **{"stage": 0, "version": 2, **hello})
    assert not bench.sent("a0", Welcome)[0].keep
    assert not bench.sent("a0", Apply)


def test_a_peer_ahead_of_the_run_joins_anew() -> None:
    bench = Bench.restarted(3)
    bench.attach("a0", stage=0, version=4)
    assert not bench.sent("a0", Welcome)[0].keep


def test_attaching_anew_in_the_middle_of_a_close_ends_the_attempt() -> None:
    bench = training()
    bench.fill()
    assert bench.run.phase is RunPhase.CLOSING
    commands = bench.attach("b0", stage=0, version=1)
    assert bench.run.phase is RunPhase.COLLECT
    assert kinds(commands, "b0")[0] == "welcome"
    assert "abort_round" not in kinds(commands, "b0")
    assert "abort_round" in kinds(commands, "a0")


# ---- proof of the state that a returning peer claims


def test_a_peer_that_claims_a_stage_without_its_digest_has_to_download_it() -> None:
    bench = training()
    bench.attach("ghost", stage=0, version=1, digest="made up")
    assert not bench.sent("ghost", Welcome)[0].keep
    assert bench.peer("ghost").stage is None
    bench.attach("replica", stage=0, version=1, digest="d")
    assert bench.sent("replica", Welcome)[0].keep
    assert bench.peer("replica").phase is PeerPhase.READY


def test_a_claim_after_a_restart_is_checked_at_once() -> None:
    """The digests of the version are in the store."""
    bench = training()
    bench.restart()
    bench.attach("ghost", stage=0, version=1, digest="made up")
    assert not bench.sent("ghost", Welcome)[0].keep
    bench.attach("replica", stage=0, version=1, digest="d")
    assert bench.sent("replica", Welcome)[0].keep


def test_digests_of_the_version_before_say_nothing_about_a_claim_after_a_restart() -> None:
    """The coordinator ended before its members had applied the step."""
    bench = training()
    bench.fill()
    bench.average_all()
    assert bench.run.history.version == 2
    bench.restart()
    bench.attach("replica", stage=0, version=2, digest="d2")
    assert bench.sent("replica", Welcome)[0].keep


def test_a_claim_during_the_apply_is_checked_when_the_holders_have_reported() -> None:
    """Until then the digest of the new version is not known."""
    bench = training()
    bench.fill()
    bench.average_all()
    members = bench.closing()
    for peer, digest in (("ghost", "made up"), ("replica", "d2")):
        bench.attach(peer, stage=0, version=2, digest=digest)
        assert bench.peer(peer).phase is PeerPhase.READY
    for peer in members:
        bench.apply(peer, digest="d2")
    assert bench.peer("ghost").phase is PeerPhase.SYNCING
    assert bench.peer("replica").phase is PeerPhase.READY
    assert list(bench.run.statistics.flags) == ["ghost"]


def test_a_late_apply_with_another_digest_holds_no_stage() -> None:
    bench = training()
    attempt = bench.records(AppliedStep)[-1].attempt_of(StageIndex(0))
    bench.attach("ghost", stage=0, version=0, averaged_attempt=attempt)
    bench.send("ghost", Applied(step=Step(1), digest="made up", norm=1.0))
    assert bench.peer("ghost").phase is PeerPhase.SYNCING


# ---- stages with as many peers as a close can carry


def test_a_full_stage_takes_no_peer_that_joins_returns_or_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "MAX_STAGE_PEERS", 2)
    bench = joined("a0", "b0", "a1")
    commands = bench.request("c0", 0, wanted_stage=0)
    assert "no more can average together" in bench.sent("c0", Refused, commands)[0].reason
    (welcome,) = bench.sent("d0", Welcome, bench.attach("d0", stage=0, version=0))
    assert not welcome.keep
    bench.send("d0", StageRequest(stage=StageIndex(0)))
    assert bench.peer("d0").goes_to == 1
    commands = bench.request("e0", 0)
    (refused,) = bench.sent("e0", Refused, commands)
    assert refused.code == "protocol"  # it tries again by itself
    assert PeerId("e0") not in bench.run.peers


def test_both_ends_of_a_tied_model_share_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_STAGE_PEERS", 2)
    bench = joined("a0", "a1", "b1", "a2", stages=3, tied=True)
    bench.attach("c0")
    assert bench.sent("c0", Refused, bench.send("c0", StageRequest(stage=StageIndex(0))))


def test_an_address_with_no_room_for_a_peer_id_keeps_no_other_peer_out() -> None:
    """The peer that joins next would be the author of the event that the core fails on."""
    bench = Bench()
    longest = f"/dns4/{'x' * 285}/tcp/1"
    carrier = CarrierAddress(
        peer="p2pd-a0", addresses=(longest, "/ip4/192.0.2.1/tcp/1"), binding=""
    )
    bench.attach("a0", carrier=carrier)
    bench.attach("b0")
    assert bench.sent("b0", Welcome)[-1].directory == ("/ip4/192.0.2.1/tcp/1/p2p/p2pd-a0",)
