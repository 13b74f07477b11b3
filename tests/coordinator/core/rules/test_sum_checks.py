"""The check of sums in a close: when it is sent, what its answers change, and who is missing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.scalar_sums import stated
from kits.swarm_world.event_bench import Bench, joined
from kits.swarm_world.facts import Moves, Options, Violation
from kits.swarm_world.sums import SumLie
from kits.swarm_world.sweep import Course, finish, run_to_the_end
from kits.swarm_world.world import World
from swarm_coordinator.core.events import Note, SumsStated, VerdictRecord
from swarm_coordinator.core.rules import held_up
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.trust.audits import AuditBook, AuditSettings
from swarm_shared.base.types import Generation, PeerId, RunId, Step
from swarm_shared.identity.linear_digest import to_text
from swarm_shared.identity.work_statements import SumDigests, SumStatement
from swarm_shared.protocol import AbortRound, Apply, Close, Refused, SumCheck
from swarm_shared.trust import evidence

OF_WHOLE_AUDITS = (
    SumLie.ADDS, SumLie.WATCHES, SumLie.LEAVES, SumLie.FALSE_AUDITS, SumLie.FORGES,
)  # fmt: skip
LIES = [lie for lie in SumLie if lie and lie not in OF_WHOLE_AUDITS]
"""Those that a check of sums is for; the others are the matter of whole audits."""

CHECKED = AuditSettings(audit_share=0.0, probation_cells=0, check_sums=True)
MEMBERS = ("a0", "b0", "c0")


def checked(
    *names: str, trust: AuditSettings = CHECKED, draw: Callable[[], float] = lambda: 0.5,
    **options: Any,
) -> Bench:  # fmt: skip
    """A run of one stage whose table is complete; a0 has counted all of it."""
    defaults = {"stages": 1, "check_sums": True}
    bench = joined(*(names or MEMBERS), audits=AuditBook(trust, draw), **{**defaults, **options})
    bench.fill()
    return bench


def asked(bench: Bench, *names: str) -> list[SumCheck]:
    """The checks that the last event has sent, one to each member."""
    return [check for peer in (names or MEMBERS) for check in bench.sent(peer, SumCheck)]


def averaged(*names: str, **options: Any) -> Bench:
    """All members have averaged, and are asked for sums."""
    bench = checked(*names, **options)
    bench.average_all()
    return bench


def digests(part: int, result: int, **slices: tuple[int, ...]) -> SumDigests:
    if not slices:
        return stated(part, result)
    return SumDigests(
        part=to_text(part), result=to_text(result),
        **{name: tuple(map(to_text, values)) for name, values in slices.items()},
    )  # fmt: skip


def states(
    bench: Bench, peer: str, *checks: SumDigests, details: bool = False, **changes: Any
) -> Any:
    order = bench.sent(peer, SumCheck, bench.log)[-1]
    stage = bench.peer(peer).stage
    values: dict[str, Any] = {
        "run": RunId("run"), "generation": Generation(bench.run.start.generation),
        "step": order.step, "attempt": order.attempt, "stage": stage, "peer": PeerId(peer),
        "seed": order.seed, "checks": checks,
    }  # fmt: skip
    statement = SumStatement(**{**values, **changes})
    return bench.event(
        SumsStated(
            bench.session(peer), PeerId(peer), statement.attempt, details, statement,
            f"signed by {peer}",
        )
    )  # fmt: skip


def state_all(
    bench: Bench, *names: str, of_a: int = 7, result: int = 7, checks: int = 1
) -> None:  # fmt: skip
    """Answer one check or several; only the first one has counted anything."""
    members = names or MEMBERS
    for _ in range(checks):
        for peer in members:
            states(bench, peer, digests(of_a if peer == members[0] else 0, result))


def phase(bench: Bench) -> RunPhase:
    return bench.run.phase


# ---- when


def test_the_check_follows_the_last_report_with_one_seed_for_all() -> None:
    bench = checked()
    bench.averaged("a0")
    bench.averaged("b0")
    assert asked(bench) == []
    bench.averaged("c0")
    checks = asked(bench)
    assert len(checks) == 3
    assert len(set(checks)) == 1
    assert not checks[0].details
    assert phase(bench) is RunPhase.CLOSING
    assert bench.step().closing.rounds


def test_the_step_is_decided_once_all_sums_agree_under_two_seeds() -> None:
    """No member knows whether the second one is of a whole audit."""
    bench = averaged(draw=random.Random(3).random)
    first = bench.sent("a0", SumCheck)[0].seed
    state_all(bench)
    checks = asked(bench)
    assert len(checks) == 3
    assert len(set(checks)) == 1
    assert checks[0].seed != first
    assert phase(bench) is RunPhase.CLOSING
    states(bench, "a0", digests(7, 7))
    states(bench, "b0", digests(0, 7))
    assert phase(bench) is RunPhase.CLOSING
    states(bench, "c0", digests(0, 7))
    assert phase(bench) is RunPhase.APPLYING
    assert all(bench.sent(peer, Apply) for peer in MEMBERS)


@pytest.mark.parametrize(
    "bench",
    [
        lambda: averaged("a0"),
        lambda: averaged(trust=AuditSettings(0.0, 0)),
        lambda: averaged(check_sums=False),
    ],
    ids=["one member", "switched off", "an average that rounds"],
)
def test_nothing_is_checked_where_nothing_can_be(bench: Any) -> None:
    assert phase(bench()) is RunPhase.APPLYING


def test_stages_are_checked_apart_and_tied_ends_together() -> None:
    names = ("a0", "b0", "a1", "b1")
    bench = checked(*names, stages=2)
    bench.averaged("a0")
    bench.averaged("b0")
    assert len(asked(bench, *names)) == 2
    tied = checked(*names, stages=2, tied=True)
    for peer in names[:3]:
        tied.averaged(peer)
    assert asked(tied, *names) == []
    tied.averaged("b1")
    assert len(set(asked(tied, *names))) == 1
    for _ in range(2):
        for peer in names:
            own = 5 if peer.startswith("a") else 0
            states(tied, peer, digests(own, 5), digests(own, 10))
    assert phase(tied) is RunPhase.APPLYING


@pytest.mark.parametrize("missing", ["part_sketch", "result_sketch"])
def test_sums_without_their_sketches_are_no_answer(missing: str) -> None:
    bench = averaged()
    state_all(bench, "a0", "b0")
    states(bench, "c0", digests(0, 7).model_copy(update={missing: None}))
    assert "it signed sums without their sketches" in bench.sent("a0", AbortRound)[0].reason
    assert phase(bench) is RunPhase.COLLECT


# ---- sums that do not agree


def test_sums_that_agree_under_the_first_seed_alone_are_asked_for_in_slices() -> None:
    bench = averaged(draw=random.Random(3).random)
    state_all(bench)
    second = bench.sent("a0", SumCheck)[0]
    state_all(bench, result=8)
    assert bench.sent("a0", SumCheck) == [second.model_copy(update={"details": True})]
    for peer in MEMBERS:
        received = (2, 1, 0) if peer == "a0" else (2, 0, 0)
        own = 2 if peer == "a0" else 0
        states(bench, peer, slices(own, (3, 2, 3), received), details=True)
    assert phase(bench) is RunPhase.COLLECT


def test_every_slice_is_asked_for_when_the_sums_do_not_agree() -> None:
    bench = averaged()
    first = asked(bench)[0]
    state_all(bench, result=8)
    checks = asked(bench)
    assert len(checks) == 3
    assert checks[0] == first.model_copy(update={"details": True})
    assert phase(bench) is RunPhase.CLOSING


def slices(own: int, result: tuple[int, int, int], received: tuple[int, ...]) -> SumDigests:
    """Of a member that put (own, own, own) in."""
    return digests(
        3 * own, sum(result), parts=(own,) * 3, results=result, received=received,
    )  # fmt: skip


def test_a_reducer_that_changed_its_sum_is_expelled_and_the_step_closes_without_it() -> None:
    bench = averaged()
    state_all(bench, of_a=6, result=7)
    for peer in MEMBERS:
        own = 2 if peer == "a0" else 0
        states(bench, peer, slices(own, (2, 3, 2), (2, 0, 0)), details=True)
    assert all(bench.sent(peer, AbortRound) for peer in MEMBERS)
    assert "is not the sum of what it received" in bench.sent("b0", Refused)[0].reason
    assert list(bench.run.peers) == ["a0", "c0"]
    (verdict,) = bench.records(VerdictRecord)
    assert (verdict.peer, verdict.step, verdict.stage, verdict.microbatch) == ("b0", 1, 0, None)
    assert sorted(verdict.statements) == sorted(f"signed by {peer}" for peer in MEMBERS * 2)
    bench.tick(2.0)
    assert bench.close_of("a0").reductions[0].members == ("a0", "c0")


def test_a_record_takes_what_the_ledger_does_and_first_what_the_liar_signed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evidence, "MAX_SUM_CHARACTERS", 3 * len("signed by a0"))
    bench = averaged()
    state_all(bench, of_a=6, result=7)
    for peer in MEMBERS:
        own = 2 if peer == "a0" else 0
        states(bench, peer, slices(own, (2, 3, 2), (2, 0, 0)), details=True)
    (verdict,) = bench.records(VerdictRecord)
    assert verdict.statements == ("signed by b0", "signed by b0", "signed by a0")
    (shown,) = bench.run.audits.verdicts
    assert (shown.peer, shown.statements) == ("b0", ()), "evidence may have megabytes"


def test_what_a_member_without_work_puts_in_expels_it_at_once() -> None:
    bench = averaged()
    states(bench, "a0", digests(7, 8))
    states(bench, "c0", digests(1, 8))
    assert bench.sent("a0", AbortRound)
    assert "nothing of it counts" in bench.sent("c0", Refused)[0].reason
    assert list(bench.run.peers) == ["a0", "b0"]


def contradict(bench: Bench, *honest: str) -> None:
    """b0 denies what it received from a0."""
    for peer in ("a0", "b0", *honest):
        states(bench, peer, digests(6 if peer == "a0" else 0, 7))
    size = 2 + len(honest)
    for peer in ("a0", "b0", *honest):
        own = 6 // size if peer == "a0" else 0
        result = [6 // size] * size
        result[1] += 1
        received = [6 // size] + [0] * (size - 1)
        received[0] += peer == "b0"
        stated = digests(
            own * size, sum(result), parts=(own,) * size, results=tuple(result),
            received=tuple(received),
        )  # fmt: skip
        states(bench, peer, stated, details=True)


def test_two_that_contradict_each_other_are_charged_alike_and_one_sits_the_step_out() -> None:
    bench = averaged()
    bench.run.audits.standings.change(PeerId("b0")).passed = 1
    bench.tick(2.0)
    contradict(bench, "c0")
    assert any("…b0 and …a0 contradict" in n.text for n in bench.commands(Note, bench.log))
    assert bench.run.peers.excluded == {"a0"}
    assert bench.records(VerdictRecord) == []
    assert held_up.held_seconds(bench.run, bench.peer("a0"), bench.now) == (
        held_up.held_seconds(bench.run, bench.peer("b0"), bench.now)
    )
    assert held_up.held_seconds(bench.run, bench.peer("b0"), bench.now) == pytest.approx(2.0)
    bench.tick(2.0)
    bench.fill()
    assert bench.close_of("c0").reductions[0].members == ("b0", "c0")


def test_of_two_in_a_stage_that_contradict_each_other_one_goes_on() -> None:
    bench = averaged("a0", "b0")
    contradict(bench)
    assert len(bench.run.peers.excluded) == 1


# ---- answers that are none


@pytest.mark.parametrize(
    "changes",
    [{"attempt": 3}, {"step": Step(2)}, {"generation": Generation(9)}, {"seed": "0" * 32}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_statement_of_something_else_never_agrees(changes: dict[str, Any]) -> None:
    bench = averaged()
    states(bench, "a0", digests(7, 7))
    states(bench, "b0", digests(0, 7))
    states(bench, "c0", digests(0, 7), **changes)
    assert phase(bench) is not RunPhase.APPLYING
    assert "c0" in bench.run.peers, "it may be late, or of another version"
    is_late = "attempt" in changes
    assert bool(bench.sent("a0", AbortRound)) != is_late
    assert bench.step().failure_counts == ({} if is_late else {"c0": 1})


def test_a_statement_with_another_number_of_sums_fails_the_attempt() -> None:
    bench = averaged()
    states(bench, "c0", digests(0, 7), digests(0, 7))
    assert bench.sent("a0", AbortRound)
    assert bench.step().failure_counts == {"c0": 1}


def test_digests_of_slices_that_were_not_asked_for_fail_the_attempt() -> None:
    """All that a member states is kept as evidence, so it states no more than it is asked for."""
    bench = averaged()
    states(bench, "c0", slices(0, (2, 3, 2), (2, 0, 0)))
    assert bench.sent("a0", AbortRound)
    assert bench.step().failure_counts == {"c0": 1}


def test_a_report_that_arrives_twice_is_no_answer_to_a_check() -> None:
    bench = averaged()
    bench.averaged("a0")
    assert bench.step().closing.rounds[bench.run.last_stage].awaited == set(MEMBERS)


def test_a_late_answer_to_the_first_check_is_no_answer_to_the_second() -> None:
    bench = averaged()
    state_all(bench, result=8)
    states(bench, "a0", digests(7, 8))
    assert bench.step().closing.rounds[bench.run.last_stage].awaited == set(MEMBERS)


def test_a_statement_of_an_aborted_attempt_is_ignored() -> None:
    bench = averaged()
    bench.failed("a0")
    before = dict(bench.step().failure_counts)
    states(bench, "b0", digests(0, 9))
    assert bench.step().failure_counts == before
    assert phase(bench) is RunPhase.COLLECT


def test_sums_that_a_member_cannot_state_end_the_attempt() -> None:
    bench = averaged()
    bench.failed("b0", reason="its average is gone")
    assert bench.sent("a0", AbortRound)
    assert bench.step().failure_counts == {"b0": 1}


few_digests = st.lists(st.integers(0, 7), max_size=4).map(tuple)
hostile_sums = st.builds(
    digests, st.sampled_from([0, 1, 6]), st.sampled_from([0, 6, 7]), parts=few_digests,
    results=few_digests, received=few_digests,
)  # fmt: skip


@given(
    said=st.lists(st.tuples(st.lists(hostile_sums, min_size=1, max_size=3), st.booleans())),
    worker=st.booleans(),
)
@settings(max_examples=100)
def test_no_statements_of_one_member_stop_the_core_or_harm_an_honest_one(
    said: list[tuple[list[SumDigests], bool]], worker: bool
) -> None:
    """a0 or c0 states anything; what the others state is true."""
    bench = averaged()
    hostile = "a0" if worker else "c0"
    honest = [peer for peer in MEMBERS if peer != hostile]
    for details in (False, True):
        for peer in honest:
            own = 2 if peer == "a0" else 0
            received = (2, 0, 0) if peer == "a0" or not worker else (1, 0, 0)
            true = slices(own, (2, 2, 2), received) if details else digests(3 * own, 6)
            states(bench, peer, true, details=details)
        for checks, of_slices in said:
            if hostile in bench.run.peers:
                states(bench, hostile, *checks, details=of_slices)
    bench.tick(1.0)
    assert {record.peer for record in bench.records(VerdictRecord)} <= {hostile}
    assert set(honest) <= bench.run.peers.keys()


# ---- members that are missing


def test_a_member_that_leaves_before_its_statement_ends_the_attempt() -> None:
    bench = averaged()
    states(bench, "a0", digests(7, 7))
    states(bench, "b0", digests(0, 7))
    bench.lose("c0")
    assert bench.sent("a0", AbortRound)
    assert phase(bench) is RunPhase.COLLECT
    bench.tick(1.0)
    assert bench.close_of("a0").reductions[0].members == ("a0", "b0")


def test_a_member_that_leaves_after_all_statements_has_its_cells_counted() -> None:
    bench = checked("a0", "b0", "a1", "b1", stages=2)
    for peer in ("a0", "b0"):
        bench.averaged(peer)
    state_all(bench, "a0", "b0", checks=2)
    bench.lose("a0")
    for peer in ("a1", "b1"):
        bench.averaged(peer)
    state_all(bench, "a1", "b1", checks=2)
    assert phase(bench) is RunPhase.APPLYING


def test_a_member_that_never_states_its_sums_is_excluded_and_charged() -> None:
    bench = averaged()
    states(bench, "a0", digests(7, 7))
    states(bench, "b0", digests(0, 7))
    bench.tick(held_up.SHORTEST_WAIT_SECONDS + 1.0)
    assert bench.sent("a0", AbortRound)
    assert bench.run.peers.excluded == {"c0"}
    assert held_up.held_seconds(bench.run, bench.peer("c0"), bench.now) > 0
    bench.tick(1.0)
    bench.averaged("a0")
    bench.averaged("b0")
    state_all(bench, "a0", "b0", checks=2)
    assert phase(bench) is RunPhase.APPLYING


def test_a_stage_that_is_silent_as_a_whole_is_asked_anew_after_its_time() -> None:
    bench = averaged()
    limit = bench.manifest.limits.lease_seconds
    bench.tick(limit + 1.0)
    assert bench.sent("a0", AbortRound)
    bench.tick(2.0)
    first, second = bench.sent("a0", Close, bench.log)
    assert second.attempt > first.attempt
    assert second.reductions == first.reductions


# ---- whole swarms


def lies_of(world: World) -> set[str]:
    return {record.peer for record in world.store.records if isinstance(record, VerdictRecord)}


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name)
@pytest.mark.parametrize("stages", [1, 2])
def test_no_liar_changes_a_sum_and_no_honest_peer_is_expelled(lie: SumLie, stages: int) -> None:
    """The world compares each applied sum with the cells that it must have."""
    for seed in range(4):
        world = run_to_the_end(
            Options(
                stages=stages, peers=4 * stages, microbatches=4, steps=4, starting=3,
                check_sums=True, sum_lies=(lie,), tied=bool(seed % 2),
                staleness=seed // 2,
            ),
            seed,
        )  # fmt: skip
        assert lies_of(world) <= {"peer0"}
        assert world.store.version == 4


def test_without_the_check_a_changed_sum_is_applied_and_the_world_notices() -> None:
    options = Options(stages=1, peers=4, steps=2, starting=3, sum_lies=(SumLie.CHANGES_SUM,))
    with pytest.raises(Violation, match="sums up"):
        run_to_the_end(options, 0)


def test_moves_are_checked_and_make_no_liar() -> None:
    world = run_to_the_end(
        Options(
            stages=2, peers=6, microbatches=6, steps=10, evaluation=0, check_sums=True,
            moves=Moves.SWARM,
        ),
        4,
    )  # fmt: skip
    assert lies_of(world) == set()
    assert world.counts["slices stated"] == world.counts["sums gone"] == 0


def run_until_sums_are_stated(world: World) -> None:
    before = world.counts["sums stated"]
    world.run(until=lambda: world.counts["sums stated"] > before)


def test_a_member_that_is_lost_during_a_check_changes_no_sum() -> None:
    options = Options(stages=2, peers=8, steps=3, starting=3, check_sums=True)
    for seed in range(4):
        world = Course(options, seed).world()
        for name in ("peer1", "peer2"):
            run_until_sums_are_stated(world)
            world.peers[PeerId(name)].attach_again()
        finish(world)
        assert lies_of(world) == set()


def test_a_coordinator_that_dies_during_a_check_closes_the_step_again() -> None:
    options = Options(stages=2, peers=6, steps=3, starting=2, check_sums=True)
    for seed in range(4):
        world = Course(options, seed).world()
        for _ in range(2):
            run_until_sums_are_stated(world)
            world.crash()
        finish(world)
        assert lies_of(world) == set()
        assert world.counts["slices stated"] == 0
