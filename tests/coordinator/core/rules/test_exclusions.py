"""Which peers a failed average excludes: one that is at odds with most owners, alone."""

from __future__ import annotations

import pytest

from kits.swarm_world.event_bench import Bench, joined
from swarm_coordinator.core.rules import held_up
from swarm_coordinator.core.rules.closing import exclusions
from swarm_coordinator.core.rules.round_membership import ABORT_BACKOFF_SECONDS
from swarm_coordinator.core.state.peers import PeerPhase
from swarm_coordinator.core.state.phases import RunPhase
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.protocol import Refused, StageRequest

STAGE = ("a0", "b0", "c0", "d0", "e0", "f0")
"""Six owners; two of them are liars where a test says so."""
LIARS = ("e0", "f0")


def closing() -> Bench:
    bench = joined(*STAGE, stages=1)
    to_close(bench)
    return bench


def to_close(bench: Bench) -> None:
    """To the next attempt to close the step."""
    for _ in range(60):
        if bench.run.phase is RunPhase.CLOSING:
            return
        bench.tick(1.0)
        bench.fill()
    raise AssertionError("the step does not close")


def excluded_after(bench: Bench, accuser: str, accused: str | None, **more: object) -> set[str]:
    """The peers that sit out after one more failed attempt."""
    to_close(bench)
    bench.failed(accuser, culprit=accused, **more)
    return set(bench.run.peers.excluded)


def next_step(bench: Bench) -> None:
    """End this step, and begin the next one with all members."""
    to_close(bench)
    bench.average_all()
    bench.apply_all()
    for peer in STAGE:
        fetch_state(bench, PeerId(peer))
    assert not bench.run.peers.excluded
    assert len(bench.run.peers.ready(0)) == len(STAGE)


def named_by_most() -> Bench:
    """The step in which most owners named f0, which sat out, is over."""
    bench = closing()
    for accuser in ("a0", "b0", "c0"):
        excluded_after(bench, accuser, "f0")
    next_step(bench)
    return bench


def fetch_state(bench: Bench, peer: PeerId) -> None:
    """A peer that sat the step out downloads the state of its stage."""
    state = bench.run.peers[peer]
    if state.phase is not PeerPhase.SYNCING or state.transfer is None:
        return
    for holder in [p.peer for p in bench.run.peers.ready(0)]:
        bench.save(holder)
    bench.tick(2.25)
    bench.ready(peer)


def test_a_step_is_closed_without_any_peer_but_one_that_has_left_or_is_the_last_of_its_stage() -> (
    None
):
    bench = joined("a0", "b0", "a1")
    found = [
        exclusions.exclude(bench.run, bench.step(), PeerId(peer), bench.now)
        for peer in ("gone", "a1", "a0", "a0", "b0")
    ]
    assert found == [False, False, True, False, False]
    assert bench.run.peers.excluded == {"a0"}


def test_one_that_most_owners_name_sits_out_alone_as_soon_as_they_are_most() -> None:
    bench = closing()
    assert excluded_after(bench, "a0", "f0") == set()
    assert excluded_after(bench, "b0", "f0") == set()
    assert excluded_after(bench, "c0", "f0") == {"f0"}


def test_one_that_names_most_of_the_others_sits_out_alone_and_the_pause_that_grew_ends() -> None:
    bench = closing()
    for accused in ("a0", "b0"):
        assert excluded_after(bench, "f0", accused) == set()
    assert bench.step().close_not_before > bench.now + ABORT_BACKOFF_SECONDS
    assert excluded_after(bench, "f0", "c0") == {"f0"}
    waits = bench.step().close_not_before - bench.now
    assert waits <= max(ABORT_BACKOFF_SECONDS, bench.manifest.limits.receipt_interval_seconds)


def test_after_an_hour_it_is_forgotten() -> None:
    bench = named_by_most()
    bench.tick(3600.0)
    assert excluded_after(bench, "d0", "f0") == set()


def test_one_that_has_failed_two_steps_alone_pauses_and_the_second_cost_one_attempt() -> None:
    bench = named_by_most()
    assert excluded_after(bench, "d0", "f0") == {"f0"}
    bench.tick(0.25)
    (refused,) = bench.sent("f0", Refused, bench.log)
    assert refused.retry_seconds == 60.0
    assert "f0" not in bench.run.peers


def test_members_that_see_the_same_failure_exclude_the_absent_one_at_the_first_attempt() -> None:
    """Each reports what it has seen itself, the later ones while the next attempt is awaited."""
    bench = closing()
    for observer in ("a0", "b0"):
        bench.failed(observer, culprit="f0")
        assert not bench.run.peers.excluded
    bench.failed("c0", culprit="f0")
    assert bench.run.peers.excluded == {"f0"}
    step = bench.step()
    assert step.close_not_before <= bench.now + ABORT_BACKOFF_SECONDS


def test_liars_that_are_fewer_cannot_have_an_honest_member_blamed_alone() -> None:
    bench = closing()
    for liar in (*LIARS, *LIARS):
        found = excluded_after(bench, liar, "a0")
    assert found == set(LIARS), "all have passed no audit, and a0 is the one that came first"
    assert not held_up.has_held_up_alone(bench.run, bench.peer("a0"), bench.now)


def test_what_a_member_has_heard_from_another_one_is_no_accusation_of_its_own() -> None:
    """A liar that ends the round with a frame that names an honest member makes all repeat it."""
    bench = closing()
    for honest in ("b0", "c0", "d0"):
        assert "a0" not in excluded_after(bench, honest, "a0", aborted_by="f0")
    to_close(bench)
    assert bench.run.peers.excluded == {"f0"}


def test_what_a_member_has_seen_itself_is_taken_when_it_comes_after_what_others_heard() -> None:
    bench = closing()
    for observer in ("a0", "b0", "c0"):
        to_close(bench)
        bench.failed("d0", culprit="f0", aborted_by=observer)
        assert bench.run.phase is RunPhase.COLLECT
        bench.failed(observer, culprit="f0")
    assert bench.run.peers.excluded == {"f0"}


def test_one_that_names_itself_sits_out_at_once_also_where_others_heard_of_it_first() -> None:
    """Its part of the average holds numbers that cannot be added, which it sees as well."""
    bench = closing()
    assert excluded_after(bench, "f0", "f0") == {"f0"}
    bench = closing()
    assert excluded_after(bench, "a0", "f0", aborted_by="f0") == set()
    bench.failed("f0", culprit="f0")
    assert bench.run.peers.excluded == {"f0"}


def test_one_that_failed_alone_in_an_earlier_step_sits_out_at_its_first_failure() -> None:
    bench = closing()
    for _ in range(2):
        assert excluded_after(bench, "f0", None) == set()
    assert excluded_after(bench, "f0", None) == {"f0"}
    next_step(bench)
    assert excluded_after(bench, "f0", "f0") == {"f0"}


def test_of_two_that_fail_together_in_a_second_step_the_lesser_one_rests_elsewhere() -> None:
    """Which of two is at fault nothing shows; in another stage it does no harm to be wrong."""
    bench = joined(*STAGE, "a1", "b1", stages=2)
    to_close(bench)
    for _ in range(2):
        excluded_after(bench, "a0", "f0")
    assert bench.run.peers.excluded == {"f0"}
    next_step(bench)
    assert not bench.sent("f0", Refused, bench.log)
    assert excluded_after(bench, "a0", "f0") == {"f0"}
    bench.tick(0.25)
    (refused,) = bench.sent("f0", Refused, bench.log)
    assert refused.retry_seconds == 60.0
    bench.tick(61.0)
    bench.request("f0", 0)
    assert bench.peer("f0").stage == 1


def test_of_two_the_other_one_sits_out_if_the_one_that_most_name_is_the_last_of_its_stage() -> None:
    bench = joined("a0", "b0", "f0", "a1", "b1", stages=2, tied=True)
    for peer in ("a0", "b0"):
        held_up.record_at_odds(bench.run, bench.peer("f0"), bench.peer(peer), bench.now)
        exclusions.exclude(bench.run, bench.step(), PeerId(peer), bench.now)
    assert excluded_after(bench, "a1", "f0") == {"a0", "b0"}
    assert excluded_after(bench, "a1", "f0") == {"a0", "b0", "a1"}


def test_a_stage_whose_last_holder_leaves_is_taken_also_by_a_peer_at_odds_with_it() -> None:
    bench = joined("a0", "b0", "a1", stages=2)
    bench.attach("f0")
    adversary, newcomer = (bench.peer(peer) for peer in ("a1", "f0"))
    held_up.record_at_odds(bench.run, adversary, newcomer, bench.now)
    adversary.leaving = True
    bench.send("f0", StageRequest(stage=StageIndex(0)))
    assert newcomer.stage == 1


@pytest.mark.parametrize("are_at_odds", [False, True])
def test_a_joining_peer_avoids_a_stage_whose_holder_it_has_failed_to_average_with(
    are_at_odds: bool,
) -> None:
    bench = joined("a0", "a1", "b1", stages=2)
    bench.attach("f0")
    if are_at_odds:
        held_up.record_at_odds(bench.run, bench.peer("a0"), bench.peer("f0"), bench.now)
    bench.send("f0", StageRequest(stage=StageIndex(0)))
    assert bench.peer("f0").stage == (1 if are_at_odds else 0), "stage 0 has fewer peers"


def test_another_device_of_its_owner_avoids_that_stage_as_well() -> None:
    bench = Bench(stages=2)
    bench.join("a0", 0, owner=PeerId("one owner"))
    bench.join_all("a1", "b1")
    for device in ("f0", "g0"):
        bench.attach(device, owner=PeerId("another"))
    held_up.record_at_odds(bench.run, bench.peer("a0"), bench.peer("f0"), bench.now)
    bench.send("g0", StageRequest(stage=StageIndex(0)))
    assert bench.peer("g0").stage == 1


@pytest.mark.parametrize("accused", ["b0", "c0"])
def test_of_two_owners_neither_is_most(accused: str) -> None:
    bench = joined("a0", accused, stages=1)
    to_close(bench)
    assert excluded_after(bench, "a0", accused) == set()
    assert excluded_after(bench, "a0", accused) == {accused}, "it came later"
    assert not held_up.has_held_up_alone(bench.run, bench.peer(accused), bench.now)
