"""Hidden audits: where the inputs come from, so that the audited peer does not see them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from kits.swarm_world.audits import WholeAuditsOnly
from kits.swarm_world.event_bench import Bench, joined
from swarm_coordinator.core.rules.auditing import deadlines
from swarm_coordinator.core.rules.auditing.auditors import AUDIT_SECONDS
from swarm_coordinator.core.rules.closing import whole_audits
from swarm_coordinator.core.state.close import Round
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.trust.arithmetic_classes import Machine
from swarm_coordinator.core.trust.audits import MAX_IN_HAND, AuditBook, AuditSettings
from swarm_coordinator.core.trust.sums import RoundSums
from swarm_coordinator.simulator.transcripts import simulated_transcript
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.protocol import Audit

WHOLE = AuditSettings(audit_share=2.0, probation_cells=0, check_sums=True)
"""Every member is drawn."""

MEMBERS = ("a0", "b0", "a1", "b1", "a2", "b2")


def benched(*names: str, book: type[AuditBook] = WholeAuditsOnly, **options: Any) -> Bench:
    values = {"stages": 3, "check_sums": True, "microbatches": 2} | options
    draws = (0.9 + number / 2**32 for number in itertools.count())  # no two secrets are alike
    return joined(*(names or MEMBERS), audits=book(WHOLE, lambda: next(draws)), **values)


def filled(*names: str, **options: Any) -> Bench:
    """The first peer of each stage has counted all microbatches."""
    bench = benched(*names, **options)
    bench.fill()
    return bench


def orders(bench: Bench, stage: int) -> list[Audit]:
    found = (order for peer in bench.run.peers for order in bench.sent(peer, Audit, bench.log))
    return [order for order in found if order.stage == stage]


def test_the_inputs_come_from_the_peers_that_counted_the_microbatch_beside_the_audited_one() -> (
    None
):
    bench = filled()
    for stage, beside in enumerate([(None, "a1"), ("a0", "a2"), ("a1", None)]):
        first, second = orders(bench, stage)
        assert {first.microbatch, second.microbatch} == {0, 1}
        for order in (first, second):
            assert order.peer == f"a{stage}"
            assert order.sources is not None
            assert (order.sources.before, order.sources.behind) == beside


def test_no_auditor_is_asked_before_the_peers_on_both_sides_have_counted_it() -> None:
    bench = benched()
    bench.report("a1", 0)
    bench.tick(1.0)
    bench.report("a2", 0)
    bench.tick(1.0)
    assert orders(bench, 1) == []
    assert [order.microbatch for order in orders(bench, 2)] == [0]
    bench.report("b0", 0)
    (order,) = orders(bench, 1)
    assert order.sources is not None
    assert (order.sources.before, order.sources.behind) == ("b0", "a2")


def test_a_neighbour_whose_cell_was_cleared_is_waited_for() -> None:
    bench = benched()
    bench.report("a0", 0)
    bench.report("a1", 0)
    bench.lose("a0")
    bench.report("a2", 0)
    bench.tick(1.0)
    assert orders(bench, 1) == []
    bench.report("b0", 0)
    assert [order.sources.before for order in orders(bench, 1) if order.sources] == ["b0"]


def test_a_cell_that_is_drawn_by_itself_is_audited_openly_in_a_whole_audit_too() -> None:
    """What an audited peer sees tells nothing of whole audits."""
    bench = filled(book=AuditBook)
    for stage in range(3):
        for order in orders(bench, stage):
            assert order.sources is None
            assert order.secret is not None


def test_the_evaluation_after_which_nothing_is_averaged_has_no_whole_audits() -> None:
    without = AuditSettings(audit_share=0.0, probation_cells=0)
    bench = Bench(
        audits=WholeAuditsOnly(without, lambda: 0.9),
        stages=1, steps=1, evaluation=1, microbatches=1, check_sums=True,
    )  # fmt: skip
    bench.join_all("a0", "b0")
    bench.one_step()
    assert bench.run.phase is RunPhase.EVALUATING
    bench.run.audits.settings = WHOLE
    bench.fill()
    assert orders(bench, 0) == []
    assert bench.run.history.heldout_loss is not None


def opened(**options: Any) -> Bench:
    """A run of which each cell is audited, openly."""
    every = AuditBook(AuditSettings(audit_share=1.0, probation_cells=0), lambda: 0.0)
    return joined(*MEMBERS, "c1", audits=every, stages=3, microbatches=1, **options)


@pytest.mark.parametrize("last_second", [False, True])
def test_an_audit_without_an_answer_goes_on_without_the_audited_peer(last_second: bool) -> None:
    """Also if the close of the step ends its time; all further ones of the owner are hidden."""
    bench = opened(steps=4)
    bench.report("a1", 0)
    (order,) = orders(bench, 1)
    assert order.sources is None
    if last_second:
        bench.report("a2", 0)
        bench.report("a0", 0)
        bench.tick(deadlines.HOLD_SECONDS * 2)
    else:
        for _ in ("b1", "c1"):
            bench.tick(AUDIT_SECONDS * 2)
        bench.report("a2", 0)
        bench.report("a0", 0)
    again = max(orders(bench, 1), key=lambda order: order.audit)
    assert again.sources is not None
    assert (again.sources.before, again.sources.behind) == ("a0", "a2")
    assert bench.run.phase is RunPhase.COLLECT
    assert bench.run.audits.unanswered == 0
    bench.tick(600.0)
    bench.tick(600.0)
    assert bench.run.audits.unanswered > 0
    assert bench.run.phase is not RunPhase.COLLECT, "it is hidden once"


def test_all_further_audits_of_an_owner_that_let_its_auditors_wait_are_hidden() -> None:
    bench = opened(steps=4)
    bench.run.audits.standings.kept(PeerId("a1")).lets_wait = True
    bench.fill()
    assert [order.sources is not None for order in orders(bench, 1)] == [True]
    assert [order.sources is not None for order in orders(bench, 0)] == [False]


def test_the_audited_peer_is_asked_after_half_the_time_that_an_auditor_has() -> None:
    bench = filled(microbatches=1, steps=4)
    (first,) = orders(bench, 1)
    assert first.sources is not None
    assert first.patience_seconds == AUDIT_SECONDS / 2
    bench = benched(microbatches=1, steps=4)
    bench.run.history.last_applied = replace(bench.applied_step(1, 1), seconds=40.0)
    bench.fill()
    (order,) = orders(bench, 1)
    assert order.sources is not None
    assert order.patience_seconds == 20.0


def test_all_cells_of_a_whole_audit_go_to_machines_that_have_computed_like_the_audited_one() -> (
    None
):
    """Otherwise it has no result."""
    count = MAX_IN_HAND + 2
    bench = benched("a0", "b0", "c0", "d0", stages=1, microbatches=count)
    device = bench.peer("a0").profile.device
    audited, other = (Machine(StageIndex(0), PeerId(peer), device) for peer in ("a0", "c0"))
    bench.run.audits.classes.note_agreement(audited, other)
    bench.fill()
    assert len(bench.sent("c0", Audit, bench.log)) == MAX_IN_HAND, "the others wait"
    for order in orders(bench, 0):
        transcript = simulated_transcript(order.step, order.microbatch, order.stage, order.stage)
        bench.audited("c0", order, transcript)
    assert len(bench.sent("c0", Audit, bench.log)) == len(orders(bench, 0)) == count


def test_a_seed_that_members_know_serves_no_other_attempt() -> None:
    bench = filled("a0", "b0", stages=1)
    bench.tick(60.0)  # no auditor answers
    (whole,) = bench.step().audits.whole.values()
    (found,) = bench.step().closing.each_round()
    assert whole.seed in seeds(bench, found)
    whole_audits.reveal(bench.step(), found, whole.seed)
    assert whole.seed not in seeds(bench, found)


def seeds(bench: Bench, round_: Round) -> tuple[str, ...]:
    """The seeds under which the sums of a round are checked."""
    check = RoundSums((), {})
    whole_audits.begin_checks(bench.run, bench.step(), round_, check)
    return check.seeds
