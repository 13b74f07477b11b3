"""Peers that compute wrongly: flagged, shown in the status, and synced anew where possible."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from kits.swarm_world.event_bench import Bench, joined
from swarm_coordinator.core.events import Note
from swarm_coordinator.core.state.peers import PeerPhase, StageTransfer
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.utilisation import Rejection
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step, Version
from swarm_shared.protocol import AbortRound, AssignStage, NotFinite, Ready


def collecting() -> Bench:
    return joined("a0", "b0", "c0", "a1")


def phase(bench: Bench, peer: str) -> PeerPhase:
    return bench.peer(peer).phase


def marked(bench: Bench) -> dict[str, Any]:
    peers = bench.status().peers
    return {p.peer: (p.flagged_times, p.flagged_reason) for p in peers if p.flagged_times}


def rejected(bench: Bench) -> int:
    """Results that were not finite, as the metrics count them."""
    return bench.status().figures.rejected[Rejection.NOT_FINITE]


def applied_by_all(bench: Bench, **digests: str) -> None:
    """One step, in which these peers report another digest than the rest."""
    bench.fill()
    bench.average_all()
    for peer in bench.closing():
        bench.apply(peer, digests.get(peer, "d"))


def say_not_finite(bench: Bench, peer: str, microbatch: int = 0, sender: str = "") -> None:
    message = NotFinite(
        step=Step(bench.run.history.version + 1), microbatch=MicrobatchIndex(microbatch),
        sender=PeerId(sender or peer),
    )  # fmt: skip
    bench.send(peer, message)


def test_a_peer_that_computes_no_numbers_is_flagged_and_synced_anew() -> None:
    bench = collecting()
    bench.report("b0", 1)
    say_not_finite(bench, "b0")
    assert phase(bench, "b0") is PeerPhase.SYNCING
    assert not bench.step().table.holds_any(PeerId("b0"))
    assert marked(bench) == {"b0": (1, "what it computed was not finite")}


def test_a_microbatch_that_is_finite_nowhere_is_held_against_one_peer_only() -> None:
    bench = collecting()
    say_not_finite(bench, "b0")
    say_not_finite(bench, "a0")
    assert phase(bench, "a0") is PeerPhase.READY
    assert set(marked(bench)) == {"b0"}


def test_a_model_that_has_diverged_is_said_to_have_and_costs_one_sync_at_most_per_peer() -> None:
    bench = collecting()
    assert bench.status().diverged == ""
    say_not_finite(bench, "b0")
    assert bench.status().diverged == "", "one peer alone may compute wrongly"
    say_not_finite(bench, "a0")
    assert bench.status().diverged.startswith(
        "Step 1 cannot be computed: microbatch 0 is not finite in stage 0 at 2 peers; training has"
    )
    say_not_finite(bench, "c0", 1)
    assert phase(bench, "c0") is PeerPhase.READY
    assert set(marked(bench)) == {"b0"}
    say_not_finite(bench, "a0", 1)
    assert rejected(bench) == 4
    assert sum("cannot be computed" in n.text for n in bench.commands(Note, bench.log)) == 1


def test_a_model_that_diverges_behind_few_senders_is_no_fault_of_theirs() -> None:
    """Each of them is soon part of results that are not finite at more peers than any receiver."""
    bench = joined("a0", "b0", "a1", "b1", "c1", "d1", microbatches=16)
    for microbatch, receiver in enumerate(("a1", "b1", "c1")):
        say_not_finite(bench, receiver, microbatch, "b0")
    assert bench.run.peers.excluded == {"b0"}
    for receiver in ("a1", "b1"):
        bench.ready(receiver)
    for round_ in range(5):
        for place, receiver in enumerate(("a1", "b1", "c1", "d1")):
            say_not_finite(bench, receiver, (place + round_) % 4, "a0")
    assert "at 3 peers; training has diverged." in bench.status().diverged
    assert marked(bench)["a0"][0] <= 1


def test_a_step_that_another_peer_can_compute_has_not_diverged() -> None:
    bench = collecting()
    say_not_finite(bench, "b0")
    say_not_finite(bench, "a0")
    bench.report("c0", 0)
    assert bench.status().diverged == ""
    say_not_finite(bench, "c0", 1)
    assert phase(bench, "c0") is PeerPhase.SYNCING, "what c0 computes may be its own fault again"


def test_the_only_peer_of_a_stage_is_flagged_once_and_the_third_time_the_model_is_suspected() -> (
    None
):
    bench = collecting()
    for _ in range(2):
        say_not_finite(bench, "a1", sender="b0")
    assert bench.status().diverged == ""
    say_not_finite(bench, "a1", sender="c0")
    assert "at its only peer; training has diverged, or that peer" in bench.status().diverged
    assert marked(bench) == {"a1": (1, "what it computed was not finite")}
    assert rejected(bench) == 3


def test_a_microbatch_that_is_finite_nowhere_is_leased_at_most_twice_a_minute_in_the_end() -> None:
    bench = joined("a0", "a1", microbatches=1)
    leased_at = [bench.now]
    while len(leased_at) < 16:
        say_not_finite(bench, "a0")
        lease = bench.step().leases[MicrobatchIndex(0)]
        bench.resolve(lease.trainer, 0, lease.lease, ok=False)
        while not bench.leased(bench.last):
            bench.tick(0.5)
        leased_at.append(bench.now)
    pauses = [late - early for early, late in pairwise(leased_at)]
    assert max(pauses[:4]) <= 2.0, "a cause that passes costs no long pause"
    assert pauses == sorted(pauses)
    assert 30.0 <= pauses[-1] <= 31.0


def test_an_evaluation_that_is_finite_nowhere_is_said_to_be() -> None:
    bench = Bench.trained(1, names=("a0", "a1"), steps=1, evaluation=1)
    assert bench.run.phase is RunPhase.EVALUATING
    for _ in range(3):
        say_not_finite(bench, "a1", 2)
    assert bench.status().diverged.startswith("The evaluation cannot be computed: microbatch 2 is")


def test_a_microbatch_that_the_step_does_not_have_is_ignored() -> None:
    bench = collecting()
    say_not_finite(bench, "b0", 999)
    assert bench.step().not_finite == {}
    assert marked(bench) == {}


def overflowing(*receivers: str) -> Bench:
    """Every receiver has computed something not finite from an output of b0."""
    bench = joined("a0", "b0", "c0", "a1", "b1", "c1", "d1", "e1", microbatches=16)
    for microbatch, receiver in enumerate(receivers):
        say_not_finite(bench, receiver, microbatch, "b0")
    return bench


def next_step(bench: Bench, *syncing: str) -> None:
    """These peers have downloaded their state, and the step ends."""
    for holder in bench.savers():
        bench.save(holder)
    for peer in syncing:
        bench.ready(peer)
    bench.tick(1.0)
    bench.one_step()


def test_a_peer_that_computes_no_numbers_with_a_fresh_state_sits_the_step_out() -> None:
    bench = overflowing("a1")
    bench.ready("a1")
    say_not_finite(bench, "a1", 1)
    assert marked(bench)["a1"] == (2, "what it computed was not finite, with a fresh state")
    assert bench.run.peers.excluded == {"a1"}
    assert bench.status().diverged == ""


def test_a_sender_whose_outputs_overflow_at_many_is_the_one_that_is_excluded() -> None:
    bench = overflowing("a1", "b1", "c1")
    assert set(marked(bench)) == {"a1", "b1", "b0"}
    assert bench.run.peers.excluded == {"b0"}
    assert phase(bench, "c1") is PeerPhase.READY
    say_not_finite(bench, "d1", 5, "b0")
    assert phase(bench, "d1") is PeerPhase.READY
    assert "d1" not in marked(bench)
    assert marked(bench)["b0"][0] == 1, "it is flagged once for one exclusion"


def test_a_sender_that_was_synced_anew_in_this_step_is_excluded_as_well() -> None:
    bench = overflowing()
    say_not_finite(bench, "b0", 9)
    bench.ready("b0")
    for microbatch, receiver in enumerate(("a1", "b1", "c1")):
        say_not_finite(bench, receiver, microbatch, "b0")
    assert bench.run.peers.excluded == {"b0"}
    assert marked(bench)["b0"][0] == 2


def test_a_sender_that_has_attached_anew_without_its_stage_is_flagged_all_the_same() -> None:
    bench = overflowing("a1", "b1")
    bench.attach("b0")
    for _ in range(2):
        say_not_finite(bench, "c1", 2, "b0")
    assert marked(bench)["b0"] == (1, "what others computed from its outputs was not finite")
    assert phase(bench, "c1") is PeerPhase.READY


def test_a_sender_whose_stage_averages_already_is_flagged_and_its_average_stands() -> None:
    bench = overflowing("a1", "b1")
    bench.report("c0", *range(16))
    bench.tick(1.0)
    members = set(bench.closing())
    assert members == {"a0", "b0", "c0"}
    say_not_finite(bench, "c1", 2, "b0")
    assert marked(bench)["b0"][0] == 1
    assert set(bench.closing()) == members
    assert not bench.run.peers.excluded


def test_senders_that_overflow_are_remembered_across_steps() -> None:
    bench = overflowing("a1", "b1")
    next_step(bench, "a1", "b1")
    say_not_finite(bench, "c1", 0, "b0")
    assert "c1" not in marked(bench)
    assert bench.run.peers.excluded == {"b0"}


def test_a_receiver_that_names_many_senders_is_held_responsible_itself() -> None:
    bench = joined("a0", "b0", "c0", "d0", "a1", "b1", microbatches=16)
    for sender in ("a0", "b0", "c0", "d0"):
        say_not_finite(bench, "a1", 0, sender)
        next_step(bench, "a1")
    assert set(marked(bench)) == {"a1"}
    assert not bench.run.peers.excluded


def test_a_receiver_with_more_senders_than_the_sender_has_receivers_is_responsible() -> None:
    bench = joined("a0", "b0", "c0", "d0", "a1", "b1", "c1", "d1", microbatches=16)
    named = [("b1", "b0"), ("c1", "b0"), ("a1", "a0"), ("a1", "c0"), ("a1", "d0"), ("a1", "b0")]
    for receiver, sender in named:
        say_not_finite(bench, receiver, 0, sender)
        next_step(bench, receiver)
    assert "b0" not in marked(bench)
    assert marked(bench)["a1"][0] == 4


def test_one_receiver_alone_excludes_no_sender() -> None:
    bench = overflowing("a1")
    for _ in range(5):
        next_step(bench, "a1")
        say_not_finite(bench, "a1", 0, "b0")
    assert set(marked(bench)) == {"a1"}


def test_the_devices_of_one_owner_count_as_one_receiver() -> None:
    bench = overflowing()
    for microbatch, device in enumerate(("f1", "g1", "h1", "i1")):
        bench.join(device, 1, owner=PeerId("owner"))
        say_not_finite(bench, device, microbatch, "b0")
    assert "b0" not in marked(bench)


def test_the_last_holder_of_a_stage_is_flagged_for_its_outputs_and_stays() -> None:
    bench = joined("a0", "a1", "b1", "c1", microbatches=16)
    bench.report("a0", 9)
    for microbatch, receiver in enumerate(("a1", "b1", "c1")):
        say_not_finite(bench, receiver, microbatch, "a0")
    assert "a0" in marked(bench)
    assert bench.step().table[9, 0].peer == "a0"


def test_the_last_peer_of_a_stage_is_flagged_and_keeps_its_stage() -> None:
    bench = collecting()
    say_not_finite(bench, "a1")
    assert phase(bench, "a1") is PeerPhase.READY
    assert set(marked(bench)) == {"a1"}


def test_a_report_about_another_step_flags_no_peer() -> None:
    bench = collecting()
    other = NotFinite(step=Step(7), microbatch=MicrobatchIndex(0), sender=PeerId("b0"))
    bench.send("b0", other)
    assert marked(bench) == {}


def test_a_sum_that_is_not_finite_ends_the_attempt_and_its_owner_is_synced_anew() -> None:
    bench = collecting()
    bench.fill()
    commands = bench.failed("b0", reset=True, not_finite=True)
    assert bench.sent("a0", AbortRound, commands)
    assert phase(bench, "b0") is PeerPhase.SYNCING
    assert set(marked(bench)) == {"b0"}
    assert bench.run.phase is RunPhase.COLLECT


def test_a_result_that_is_not_finite_at_one_member_is_tried_again_with_it() -> None:
    bench = collecting()
    bench.fill()
    bench.failed("b0", not_finite=True)
    assert phase(bench, "b0") is PeerPhase.READY
    assert set(marked(bench)) == {"b0"}


def test_a_member_that_cannot_apply_is_synced_anew_and_the_others_go_on() -> None:
    bench = collecting()
    bench.fill()
    bench.average_all()
    bench.failed("b0", reset=True)
    for peer in ("a0", "c0", "a1"):
        bench.apply(peer)
    assert bench.run.phase is RunPhase.COLLECT
    assert phase(bench, "b0") is PeerPhase.SYNCING
    assert set(marked(bench)) == {"b0"}


def test_a_replica_that_was_never_bitwise_equal_is_an_unlike_device_and_stays() -> None:
    bench = collecting()
    for _ in range(3):
        applied_by_all(bench, b0="of another kind")
    assert phase(bench, "b0") is PeerPhase.READY
    assert marked(bench) == {}


def test_one_that_was_alone_in_its_stage_has_agreed_with_no_other_device() -> None:
    bench = joined("a0", "a1")
    applied_by_all(bench)
    for peer in ("b0", "c0"):
        bench.request(peer, 0, wanted_stage=0)
        bench.save("a0")
        bench.ready(peer)
    applied_by_all(bench, a0="of another kind")
    assert phase(bench, "a0") is PeerPhase.READY
    assert marked(bench) == {}


def test_parameters_of_a_peer_that_changed_stage_are_compared_with_those_of_its_new_stage() -> None:
    bench = joined("a0", "b0", "c0", "a1", "b1")
    applied_by_all(bench)
    moves = StageTransfer(StageIndex(1), bench.now)
    bench.run.peers.begin_transfer(bench.peer("c0"), moves)
    bench.event_tick()
    for holder in ("a1", "b1"):
        bench.save(holder)
    bench.ready("c0")
    bench.fill()
    bench.average_all()
    for peer in bench.closing():
        stage = bench.peer(peer).stage
        bench.apply(peer, digest=f"of stage {stage}", norm=1.0 + (stage or 0))
    assert bench.peer("c0").stage == 1
    assert phase(bench, "c0") is PeerPhase.READY
    assert marked(bench) == {}


def test_two_replicas_that_differ_are_both_kept_without_a_majority() -> None:
    bench = joined("a0", "b0", "a1")
    applied_by_all(bench)
    applied_by_all(bench, b0="odd")
    assert phase(bench, "a0") is phase(bench, "b0") is PeerPhase.READY


def test_a_joining_peer_with_another_state_than_the_holders_fetches_it_again() -> None:
    bench = collecting()
    applied_by_all(bench)
    bench.request("n0", 0, wanted_stage=0)
    bench.save("a0")
    bench.save("b0")
    bench.save("c0")
    assert bench.sent("n0", AssignStage)
    bench.send("n0", Ready(stage=StageIndex(0), version=Version(1), digest="damaged"))
    assert phase(bench, "n0") is PeerPhase.SYNCING
    assert set(marked(bench)) == {"n0"}
    commands = bench.tick(1.5)
    for peer in ("a0", "b0", "c0"):
        commands += bench.save(peer)
    assert bench.sent("n0", AssignStage, commands)
    bench.ready("n0")
    assert phase(bench, "n0") is PeerPhase.READY


def test_a_flag_outlasts_the_attachment() -> None:
    bench = collecting()
    say_not_finite(bench, "b0")
    bench.lose("b0")
    bench.join("b0", 0)
    assert marked(bench)["b0"][0] == 1
