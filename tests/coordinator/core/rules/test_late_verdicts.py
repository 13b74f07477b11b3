"""Late verdicts: a lost audit takes the owner's unverified steps out of the model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kits.swarm_world.event_bench import Bench, joined
from kits.swarm_world.facts import Options
from kits.swarm_world.sweep import run_to_the_end
from swarm_coordinator.core.events import (
    CheckpointRecord,
    Note,
    StandingsRecord,
    VerdictRecord,
)
from swarm_coordinator.core.state.checkpoints import CheckpointState
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.trust.audits import AuditBook, AuditSettings
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import PeerId, Step, Version
from swarm_shared.protocol import AssignStage, Audit

ROLLS_BACK = AuditSettings(audit_share=0.001, probation_cells=0, rolls_back=True)
NAMES = ("a0", "b0", "c0", "d0", "a1")
LIAR = "a0"


class Lots:
    """Draws that audit nothing, or all."""

    def __init__(self) -> None:
        self.audits = False

    def __call__(self) -> float:
        return 0.0 if self.audits else 0.99


def training(settings: AuditSettings = ROLLS_BACK, **options: Any) -> tuple[Bench, Lots]:
    """Four owners in the first stage, of which the first counts; a checkpoint in each version."""
    lots = Lots()
    defaults = {"checkpoint_steps": 1, "keep": 3, "steps": 1000}
    bench = joined(*NAMES, audits=AuditBook(settings, lots), **{**defaults, **options})
    return bench, lots


def steps(bench: Bench, number: int, *, checkpoints: bool = True) -> None:
    for _ in range(number):
        bench.one_step()
        if checkpoints:
            bench.checkpoint()


def orders(bench: Bench, of: str) -> list[tuple[str, Audit]]:
    """The orders of the last event to audit cells of this peer."""
    return [(p, o) for p in bench.run.peers for o in bench.sent(p, Audit) if o.peer == of]


def pass_audits(bench: Bench, lots: Lots, peer: str) -> None:
    """The peer counts one microbatch, and an auditor agrees."""
    lots.audits = True
    bench.report(peer, 0)
    lots.audits = False
    ((auditor, order),) = orders(bench, peer)
    bench.audited(auditor, order, bench.receipt(peer, 0).transcript)


def other(true: Transcript) -> Transcript:
    return true.model_copy(update={"gradient": "f" * 32})


def lose_audit(bench: Bench, lots: Lots, liar: str = LIAR) -> None:
    """The peer counts one microbatch, and two owners compute another gradient."""
    lots.audits = True
    bench.report(liar, 0)
    lots.audits = False
    found = bench.receipt(liar, 0).transcript
    while pending := orders(bench, liar):
        auditor, order = pending[0]
        changes = {} if order.comparison is None else {"distance": 1.0}
        bench.audited(auditor, order, other(found), **changes)
    assert liar not in bench.run.peers


def roll_backs(bench: Bench) -> list[int]:
    return bench.roll_backs()


def recover(bench: Bench) -> None:
    """All peers have downloaded the checkpoint, and the next step begins."""
    for peer in list(bench.run.peers):
        bench.ready(peer)
    assert bench.run.phase is RunPhase.COLLECT


# ---------------------------------------------------------------- to which version


def test_the_run_returns_to_the_checkpoint_before_the_first_unverified_step() -> None:
    bench, lots = training()
    steps(bench, 2)
    pass_audits(bench, lots, LIAR)
    steps(bench, 1)  # with the passed audit: step 3 is the owner's for good
    steps(bench, 2)
    assert bench.run.audits.standings.get(PeerId(LIAR)).unvested_since == 4
    lose_audit(bench, lots)
    assert roll_backs(bench) == [3]
    assert bench.run.history.version == 3
    (note,) = [n.text for n in bench.commands(Note, bench.log) if "goes back" in n.text]
    assert "the steps since 4 have unverified work of an owner that lost an audit" in note
    assigned = [bench.sent(p, AssignStage, bench.log)[-1] for p in NAMES if p != LIAR]
    assert {(a.version, a.item) for a in assigned} >= {(3, "checkpoint/3/0")}
    recover(bench)
    bench.one_step()
    assert bench.run.history.version == 4


def test_of_two_owners_that_lose_at_once_the_earlier_unverified_step_decides() -> None:
    lots = Lots()
    bench = joined(
        *NAMES, "e0", audits=AuditBook(ROLLS_BACK, lots), checkpoint_steps=1, keep=3, steps=1000
    )
    liars = ("b0", "c0")
    for worker in ("d0", *liars):
        for peer in (worker, "a1"):
            bench.report(peer, 0, 1)
        bench.average_all()
        bench.apply_all()
        bench.checkpoint()
    lots.audits = True
    bench.report("a0", 0)
    lots.audits = False
    honest = bench.receipt("a0", 0).transcript
    while pending := orders(bench, "a0"):
        auditor, order = pending[0]
        lies = auditor in liars
        distance = 1.0 if lies and order.comparison is not None else None
        bench.audited(auditor, order, other(honest) if lies else honest, distance=distance)
    assert [record.peer for record in bench.records(VerdictRecord)] == ["b0", "c0"]
    assert roll_backs(bench) == [1], "b0 has worked on step 2, and c0 on step 3"


def test_by_default_the_run_goes_on() -> None:
    bench, lots = training(AuditSettings(audit_share=0.001, probation_cells=0))
    steps(bench, 3)
    lose_audit(bench, lots)
    assert bench.records(VerdictRecord)
    assert roll_backs(bench) == []
    assert bench.run.history.version == 3


def test_a_lie_that_is_found_before_anything_was_applied_takes_nothing_back() -> None:
    bench, lots = training()
    for _ in range(2):
        for peer in ("b0", "a1"):
            bench.report(peer, 0, 1)
        bench.average_all()
        bench.apply_all()
        bench.checkpoint()
    lose_audit(bench, lots)
    assert roll_backs(bench) == []


def test_without_a_checkpoint_the_run_begins_anew() -> None:
    bench, lots = training(checkpoint_steps=100)
    steps(bench, 2, checkpoints=False)
    lose_audit(bench, lots)
    assert roll_backs(bench) == [0]
    recover(bench)


def test_unverified_steps_older_than_all_checkpoints_are_taken_back_in_part() -> None:
    bench, lots = training()
    steps(bench, 6)
    lose_audit(bench, lots)
    assert roll_backs(bench) == [4]
    assert any("so has the oldest checkpoint" in n.text for n in bench.commands(Note, bench.log))


def test_a_verdict_during_a_close_aborts_it() -> None:
    bench, lots = training(microbatches=2, staleness=1)
    steps(bench, 2, checkpoints=False)
    bench.run.audits.unverified_since = Step(1)
    bench.fill()
    bench.event_tick()
    assert roll_backs(bench) == [0]
    assert bench.run.steps.current is None
    assert not lots.audits


# ---------------------------------------------------------------- bounds


def test_no_step_is_computed_a_third_time_for_a_verdict() -> None:
    bench, lots = training()
    steps(bench, 4)
    lose_audit(bench, lots, "a0")
    assert roll_backs(bench) == [2]
    recover(bench)
    steps(bench, 1)  # by another liar, in a step that is computed again
    lose_audit(bench, lots, "b0")
    assert roll_backs(bench) == [2]
    assert any("no checkpoint is left" in n.text for n in bench.commands(Note, bench.log))


def test_beyond_what_was_computed_twice_the_run_goes_back_again() -> None:
    bench, lots = training()
    steps(bench, 2)
    lose_audit(bench, lots, "a0")
    recover(bench)
    steps(bench, 1)
    pass_audits(bench, lots, "b0")
    steps(bench, 3)
    lose_audit(bench, lots, "b0")
    assert roll_backs(bench) == [1, 3]


def test_standings_go_back_with_the_run_and_are_stored() -> None:
    bench, lots = training()
    steps(bench, 2)
    pass_audits(bench, lots, "b0")
    steps(bench, 1)
    assert bench.run.audits.standings.get(PeerId("b0")).vested_step == 3
    lose_audit(bench, lots)
    assert roll_backs(bench) == [1]
    stored = {s.owner: s for r in bench.records(StandingsRecord) for s in r.standings}
    assert stored[PeerId("b0")].vested_step == 1
    assert stored[PeerId(LIAR)].unvested_since == 0


@given(
    st.lists(st.integers(1, 40), unique=True, max_size=8),
    st.integers(1, 6), st.integers(1, 41), st.integers(0, 41),
)  # fmt: skip
def test_a_checkpoint_to_return_to_is_kept_and_not_before_what_was_computed_twice(
    versions: list[int], keep: int, since: int, earliest: int
) -> None:
    state = CheckpointState(stored=None, overdue=False, keep=keep)
    for version in sorted(versions):
        state.store(Bench.checkpoint_of(1, version))
    kept = sorted(versions)[-keep:]
    found = state.before(Step(since), Version(earliest))
    allowed = [version for version in kept if version >= earliest]
    if found is None:
        assert not allowed
        return
    below = [version for version in allowed if version < since]
    assert found.version == (max(below) if below else min(allowed))
    state.return_to(found)
    assert state.stored_version == found.version
    assert [one.version for one in state.older] == [v for v in kept if v < found.version]


# ---------------------------------------------------------------- whole runs


@pytest.mark.parametrize("seed", range(3))
def test_with_few_audits_no_work_of_a_found_liar_stays_in_the_model(seed: int) -> None:
    options = Options(
        stages=1 + seed % 2, peers=5 * (1 + seed % 2), microbatches=4, steps=8, audit_share=0.5,
        starting=4, checkpoint_steps=1, liars=1, rolls_back=True, staleness=seed // 2 % 2,
    )  # fmt: skip
    world = run_to_the_end(options, seed)
    lost = [r for r in world.store.records if isinstance(r, VerdictRecord)]
    assert lost, "the liar was not found; another seed is needed"
    assert {world.peers[record.peer].lies for record in lost} == {True}
    # A run never goes back before its first checkpoint.
    first = min(r.version for r in world.store.records if isinstance(r, CheckpointRecord))
    steps = [step for step in world.store.applied.values() if step.step > first]
    workers = {share.peer for step in steps for share in step.shares}
    assert workers
    assert not any(world.peers[peer].lies for peer in workers)
    assert sorted(world.store.applied) == list(range(1, 9))
