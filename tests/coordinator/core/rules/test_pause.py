"""Pausing volunteers: the run does not wait for them, and what they have counted still counts."""

from __future__ import annotations

import pytest

from kits.memory import offers, takes
from kits.swarm_world.event_bench import Bench
from kits.swarm_world.facts import COORDINATOR
from swarm_coordinator.core.events import Command, Restored
from swarm_coordinator.core.rules.roster import MAX_CHANGES_AT_ONCE
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.transition import begin
from swarm_shared.base.types import PeerId, Version
from swarm_shared.protocol import Apply, AssignStage, Lease, Leaving, Roster

ALL = ("a0", "b0", "a1", "b1")


def offered(bench: Bench, commands: list[Command], to: str = "a1") -> dict[str, bool]:
    """Whether each peer takes work, by the newest roster among the commands."""
    roster = bench.sent(to, Roster, commands)[-1]
    return {record.peer: record.accepts_work for record in roster.peers}


def waits_for(bench: Bench) -> object:
    return bench.status().waiting_for


def test_a_paused_peer_accepts_no_work_in_the_roster_until_it_resumes() -> None:
    bench = Bench.trained(1)
    assert offered(bench, bench.pause("b0")) == {"a0": True, "b0": False, "a1": True, "b1": True}
    assert offered(bench, bench.resume("b0")) == dict.fromkeys(ALL, True)


def test_a_paused_peer_gets_no_leases_and_stays_a_member_of_the_close() -> None:
    bench = Bench.trained(1)
    bench.resolve_all()
    bench.report("b0", 0)
    bench.pause("b0")
    assert bench.run.phase is RunPhase.COLLECT
    commands = bench.report("a0", 1) + bench.report("a1", 0, 1)
    assert bench.run.phase is RunPhase.CLOSING
    assert bench.close_of("b0").committed == (0,)
    bench.average_all()
    commands += bench.apply_all()
    commands += bench.tick(2.0)
    assert bench.sent("b0", Apply, bench.log)
    assert bench.run.steps.current is not None
    assert not bench.sent("b0", Lease, commands)
    assert bench.sent("a0", Lease, commands)


def test_leases_that_a_pausing_trainer_hands_back_go_to_the_others() -> None:
    bench = Bench.trained(1)
    bench.resolve_all()
    bench.tick(20.0)
    bench.pause("a0")
    mine = list(bench.step().leases.driven_by(PeerId("a0")))
    assert mine
    for microbatch in mine:
        bench.resolve("a0", microbatch, bench.step().leases[microbatch].lease, ok=False)
    commands = bench.tick(3.0)
    assert set(mine) <= {microbatch.microbatch for _, microbatch in bench.leased(commands)}
    assert not bench.sent("a0", Lease, commands)


@pytest.mark.parametrize("between", [False, True], ids=["in a step", "between two steps"])
def test_the_run_waits_for_a_stage_whose_only_peer_pauses_and_reports_it(between: bool) -> None:
    bench = Bench.trained(1, names=("a0", "a1", "b1"))
    if between:
        bench.fill()
        bench.pause("a0")
        bench.average_all()
        bench.apply_all()
        assert bench.run.phase is RunPhase.WAITING
    else:
        bench.pause("a0")
        assert bench.run.phase is RunPhase.COLLECT
    before = bench.run.history.version
    commands = bench.tick(30.0)
    assert waits_for(bench) == "stage 0, where every peer has paused"
    assert not any(bench.sent(peer, Lease, commands) for peer in ("a0", "a1", "b1"))
    assert bench.run.history.version == before, "the version is not lost: its holder is there"
    commands = bench.resume("a0") + bench.tick(120.0)
    assert waits_for(bench) == ""
    assert any(bench.sent(peer, Lease, commands) for peer in ("a0", "a1", "b1"))


def test_a_joining_peer_gets_a_stage_whose_peers_all_pause() -> None:
    bench = Bench.trained(1, names=("a0", "b0", "c0", "a1"))
    bench.pause("a1")
    bench.request("new", 0)
    assert bench.peer("new").stage == 1


def test_a_joining_peer_gets_an_empty_stage_rather_than_one_with_a_paused_peer() -> None:
    bench = Bench.trained(1, names=("a0", "a1"))
    bench.pause("a0")
    bench.lose("a1")
    bench.request("new", 0)
    assert bench.peer("new").stage == 1
    bench.request("next", 0)
    assert bench.peer("next").stage == 0


def test_a_joining_peer_too_small_for_the_empty_stage_gets_one_whose_peers_all_pause() -> None:
    bench = Bench()
    wide = bench.manifest.stages[1].model_copy(update={"memory": takes(900)})
    manifest = bench.manifest.model_copy(update={"stages": (bench.manifest.stages[0], wide)})
    start = Restored(1, Version(0), None, None, False, None)
    bench.run = begin(manifest, "manifest", COORDINATOR, start, bench.now)
    bench.join_all("a0", "a1")
    bench.pause("a0")
    bench.lose("a1")
    bench.request("new", 1, memory=offers(899))
    assert bench.peer("new").stage == 0


def test_a_paused_peer_is_no_replacement_for_one_that_leaves_in_the_middle_of_a_step() -> None:
    bench = Bench.trained(1, names=("a0", "b0", "a1"))
    bench.resolve_all()
    bench.report("a0", 0)
    bench.pause("b0")
    commands = bench.send("a0", Leaving())
    assert offered(bench, commands)["a0"], "it is the only one that works"
    assert not bench.sent("b0", AssignStage, commands)


def test_the_status_shows_paused_peers() -> None:
    bench = Bench.trained(1)
    bench.pause("b1")
    peers = bench.status().peers
    assert {peer.peer: peer.paused for peer in peers} == {
        "a0": False, "b0": False, "a1": False, "b1": True,
    }  # fmt: skip


def test_a_peer_that_pauses_and_resumes_for_ever_has_no_roster_sent_each_time() -> None:
    bench = Bench.trained(1)
    for _ in range(MAX_CHANGES_AT_ONCE):
        bench.pause("b0")
        bench.resume("b0")
    sent: list[Command] = []
    for _ in range(100):
        sent += bench.pause("b0") + bench.resume("b0")
    assert bench.sent("a1", Roster, sent) == []
    assert offered(bench, bench.pause("b0") + bench.tick(1.0))["b0"] is False
    assert bench.sent("a1", Roster, bench.pause("b1"))  # those of others go out at once
