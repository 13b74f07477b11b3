"""Owners decide, not identities: norms, snapshots, checkpoints, fingerprints and deadlines."""

from __future__ import annotations

from typing import Any

import pytest

from kits.swarm_world.event_bench import SHA, Bench, Commands, joined
from swarm_coordinator.core.events import FetchSnapshot
from swarm_coordinator.core.state.peers import PeerPhase
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.trust.audits import AuditBook, AuditSettings
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.protocol import AssignStage, SaveSnapshot

FALSE = "f" * 64
CROWD = ("l0", "m0", "n0", "o0", "p0")
"""Devices of one owner, in the first stage."""
ONE_OWNER = PeerId("crowd")
QUIET = AuditSettings(audit_share=0.0, probation_cells=3)


def bench_of(*honest: str, crowd_owner: PeerId | None = ONE_OWNER, **options: Any) -> Bench:
    """Honest peers, each of an owner of its own, and a crowd in the first stage."""
    bench = joined(*honest, audits=AuditBook(QUIET, lambda: 0.99), **options)
    for peer in CROWD:
        bench.join(peer, 0, owner=crowd_owner)
    return bench


def establish(bench: Bench, *owners: str) -> None:
    for owner in owners:
        bench.run.audits.standings.change(PeerId(owner)).passed = QUIET.probation_cells


def average(bench: Bench, norms: dict[str, float]) -> None:
    for peer in bench.closing():
        bench.averaged(peer, norms.get(peer, 1.0))


def flagged(bench: Bench) -> set[str]:
    return set(bench.run.statistics.flags)


def fetches(bench: Bench, commands: Commands) -> list[FetchSnapshot]:
    return [f for f in bench.commands(FetchSnapshot, commands) if f.stage == 0]


# ---------------------------------------------------------------- norms


@pytest.mark.parametrize("established", [False, True])
def test_a_crowd_does_not_outvote_two_owners_about_a_norm(established: bool) -> None:
    """Neither the devices of one owner nor strangers, where the two are established."""
    bench = bench_of("a0", "b0", "a1", crowd_owner=None if established else ONE_OWNER)
    establish(bench, *(("a0", "b0") if established else ()))
    bench.fill()
    average(bench, dict.fromkeys(CROWD, 1.5))
    assert bench.run.phase is RunPhase.APPLYING
    assert flagged(bench) == set(CROWD)
    assert {"a0", "b0"} <= set(bench.closing())


def test_of_two_owners_the_device_attached_longest_decides_after_another_average() -> None:
    bench = bench_of("z0", "a1")
    bench.fill()
    average(bench, dict.fromkeys(CROWD, 1.5))
    assert bench.run.phase is RunPhase.COLLECT
    while bench.run.phase is not RunPhase.CLOSING:
        bench.tick(0.25)
    average(bench, dict.fromkeys(CROWD, 1.5))
    assert bench.run.phase is RunPhase.APPLYING
    assert flagged(bench) == set(CROWD)


# ---------------------------------------------------------------- snapshots and checkpoints


def test_the_devices_of_one_owner_do_not_outvote_two_owners_about_a_checkpoint() -> None:
    bench = bench_of("y0", "z0", "a1", checkpoint_steps=1)
    commands = bench.one_step()
    asked = {peer for peer in bench.savers(commands) if peer.endswith("0")}
    assert {"y0", "z0"} < asked
    commands = bench.save("l0", FALSE) + bench.save("y0") + bench.save("z0")
    (fetch,) = fetches(bench, commands)
    assert fetch.sha256 == SHA


def test_one_holder_of_each_owner_saves_before_a_second_one_of_any() -> None:
    bench = bench_of("y0", "z0", "a1", checkpoint_steps=1)
    commands = bench.one_step()
    asked = {peer for peer in bench.savers(commands) if peer.endswith("0")}
    assert asked == {"l0", "y0", "z0"}


def test_established_owners_save_first_and_decide_about_a_checkpoint() -> None:
    bench = bench_of("y0", "z0", "a1", crowd_owner=None, checkpoint_steps=1)
    establish(bench, "y0", "z0")
    commands = bench.one_step()
    asked = {peer for peer in bench.savers(commands) if peer.endswith("0")}
    assert {"y0", "z0"} < asked
    (stranger,) = asked - {"y0", "z0"}
    commands = bench.save(stranger, FALSE)
    assert not fetches(bench, commands)
    (fetch,) = fetches(bench, bench.save("y0") + bench.save("z0"))
    assert (fetch.sha256, {holder.peer for holder in fetch.holders}) == (SHA, {"y0", "z0"})


def test_strangers_do_not_get_an_established_holder_synced_anew() -> None:
    bench = bench_of("a0", "b0", "a1", checkpoint_steps=1)
    bench.one_step()
    for peer, sha in {"l0": FALSE, "a0": SHA, "b0": SHA}.items():
        bench.save(peer, sha)
    assert flagged(bench) == {"l0"}
    assert bench.peer("a0").phase is PeerPhase.READY


def test_a_joining_peer_gets_the_state_of_two_owners_and_not_that_of_many_devices() -> None:
    bench = bench_of("y0", "z0", "a1")
    bench.one_step()
    bench.request("x0", 0, wanted_stage=0)
    commands = bench.tick(1.0)
    asked = [p for p in bench.run.peers if bench.sent(p, SaveSnapshot, bench.log)]
    assert {"y0", "z0"} <= set(asked)
    for peer in asked:
        commands += bench.save(peer, FALSE if peer in CROWD else SHA)
    commands += bench.tick(3.0)
    (assigned,) = bench.sent("x0", AssignStage, commands)
    assert assigned.sha256 == SHA


# ---------------------------------------------------------------- fingerprints


@pytest.mark.parametrize("established", [False, True])
def test_the_devices_of_one_owner_do_not_outvote_two_owners_about_parameters(
    established: bool,
) -> None:
    bench = bench_of("a0", "b0", "a1", crowd_owner=None if established else ONE_OWNER)
    establish(bench, *(("a0", "b0") if established else ()))
    bench.one_step()
    bench.fill()
    bench.average_all()
    for peer in bench.closing():
        bench.apply(peer, "other" if peer in CROWD else "d")
    assert flagged(bench) == set(CROWD)
    assert bench.run.history.fingerprints[StageIndex(0)] == {"d"}


def test_a_digest_of_strangers_is_no_claim_to_a_stage_of_established_owners() -> None:
    """Their own state stays: their device may round differently."""
    bench = bench_of("a0", "b0", "a1", crowd_owner=None)
    establish(bench, "a0", "b0")
    bench.fill()
    bench.average_all()
    for peer in bench.closing():
        bench.apply(peer, "other" if peer in CROWD else "d")
    assert flagged(bench) == set()
    assert bench.run.history.fingerprints[StageIndex(0)] == {"d"}
    bench.attach("z0", stage=0, version=1, digest="other")
    assert bench.peer("z0").phase is PeerPhase.ADMITTED


# ---------------------------------------------------------------- deadlines


def deadline(bench: Bench) -> float:
    """Seconds until the close goes on without the honest peers of the first stage."""
    seconds = 0.0
    while bench.run.phase is RunPhase.CLOSING and seconds < 60.0:
        bench.tick(0.5)
        seconds += 0.5
    return seconds


LIMITS = {"lease_seconds": 60.0}


def test_fast_devices_of_one_owner_set_no_deadline_for_two_owners() -> None:
    bench = bench_of("a0", "b0", "a1", limits=LIMITS)
    bench.fill()
    for peer in bench.closing():
        if peer not in ("a0", "b0"):
            bench.averaged(peer)
    assert deadline(bench) == 60.0
    alone = bench_of("a0", "b0", "a1", crowd_owner=None, limits=LIMITS)
    alone.fill()
    for peer in alone.closing():
        if peer not in ("a0", "b0"):
            alone.averaged(peer)
    assert deadline(alone) < 60.0


def test_fast_strangers_set_no_deadline_for_established_owners_that_apply() -> None:
    bench = bench_of("a0", "b0", "a1", crowd_owner=None, limits=LIMITS)
    establish(bench, "a0", "b0")
    bench.fill()
    bench.average_all()
    for peer in bench.closing():
        if peer not in ("a0", "b0", "a1"):
            bench.apply(peer)
    closing = bench.step().closing
    assert closing.most_applied_at is None
    bench.apply("a0")
    bench.apply("b0")
    assert closing.most_applied_at == bench.now
