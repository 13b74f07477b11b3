"""Chains of transcripts that do not fit, and microbatches that are taken out again."""

from __future__ import annotations

import pytest

from kits.swarm_world.audit_bench import (
    NO_CELL,
    audited,
    draws,
    orders,
    orders_of_log,
    the_order,
    true,
)
from kits.swarm_world.event_bench import OTHER_DIGEST, Bench, joined
from swarm_coordinator.core.events import Note, ReceiptsVerified, VerdictRecord
from swarm_coordinator.core.rules.auditing import deadlines
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.trust.audits import AuditSettings
from swarm_coordinator.simulator.transcripts import simulated_transcript
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.protocol import Audit, Close, Drop, Dropped, Lease


def broken(*names: str) -> Bench:
    """a1 has received another tensor than a0 says to have sent; both are audited."""
    bench = audited(*names, settings=NO_CELL)
    bench.report("a0", 0)
    bench.report_broken("a1", 0, "input")
    return bench


def order_of(bench: Bench, peer: str) -> tuple[str, Audit]:
    """The latest order to audit this peer, with its auditor."""
    found = [(auditor, order) for auditor, order in orders_of_log(bench) if order.peer == peer]
    return max(found, key=lambda pair: pair[1].audit)


def agree(bench: Bench, peer: str) -> None:
    """The auditor of this peer finds what it has signed."""
    auditor, order = order_of(bench, peer)
    bench.audited(auditor, order, bench.step().table[order.microbatch, order.stage].transcript)


def lose(bench: Bench, peer: str) -> None:
    """Two auditors of this peer compute another gradient."""
    for _ in range(2):
        auditor, order = order_of(bench, peer)
        held = bench.step().table[order.microbatch, order.stage].transcript
        other = held.model_copy(update={"gradient": OTHER_DIGEST})
        bench.audited(auditor, order, other)
        bench.audited(*order_of(bench, peer), other, distance=1.0)
    assert peer not in bench.run.peers


def holders(bench: Bench) -> dict[tuple[int, int], str]:
    return {(m, stage): str(cell.peer) for (m, stage), cell in bench.step().table.items()}


def dropped(bench: Bench, peer: str, step: int = 1) -> None:
    """The peer has taken the microbatch 0 out."""
    stage = bench.peer(peer).stage
    bench.send(peer, Dropped(step=Step(step), stage=stage, microbatches=(MicrobatchIndex(0),)))


# ---------------------------------------------------------------- which sides are audited


def test_both_sides_of_a_broken_chain_are_audited_whatever_the_draw() -> None:
    bench = audited(settings=NO_CELL)
    bench.report("a0", 0)
    assert not orders(bench)
    bench.report_broken("a1", 0, "input")
    assert {order.peer for sent in orders(bench).values() for order in sent} == {"a0", "a1"}


def test_a_broken_chain_without_a_liar_is_computed_again_as_a_whole() -> None:
    bench = audited(settings=NO_CELL)
    bench.report("a0", 0)
    bench.report_broken("a1", 0, "input")
    for auditor, order in orders_of_log(bench):
        held = bench.step().table[order.microbatch, order.stage].transcript
        bench.audited(auditor, order, held)
    assert not bench.step().table
    for peer in ("a0", "a1"):
        assert bench.sent(peer, Drop, bench.log)[-1].microbatches == (0,)
    assert any("contradict each other" in note.text for note in bench.commands(Note, bench.log))


def test_a_broken_chain_without_auditors_is_computed_again_and_charged_to_both() -> None:
    bench = audited("a0", "a1", settings=NO_CELL)
    bench.tick(3.0)
    bench.report("a0", 0)
    bench.report_broken("a1", 0, "input")
    assert not bench.step().table
    held = bench.run.held_time
    assert held.seconds(PeerId("a0"), bench.now) == held.seconds(PeerId("a1"), bench.now) > 0.0


def test_a_side_that_is_being_audited_already_is_asked_for_no_second_time() -> None:
    bench = audited()
    bench.report("a0", 0)
    auditor, order = the_order(bench)
    bench.report_broken("a1", 0, "input")
    assert the_order(bench)[1].peer == "a1"
    bench.audited(auditor, order, true(order))
    assert bench.run.audits.passed == 1


def test_what_is_counted_anew_at_a_broken_boundary_is_audited_as_well() -> None:
    bench = broken()
    bench.lose("a1")
    bench.report_broken("b1", 0, "input")
    assert the_order(bench)[1].peer == "b1"


def test_a_chain_that_breaks_again_is_examined_again() -> None:
    bench = broken()
    agree(bench, "a0")
    agree(bench, "a1")
    bench.report("b0", 0)
    bench.report_broken("b1", 0, "input")
    assert {order.peer for sent in orders(bench).values() for order in sent} == {"b0", "b1"}


# ---------------------------------------------------------------- what follows


def test_a_chain_that_fits_again_keeps_its_cells_and_delays_no_stage() -> None:
    bench = broken()
    bench.lose("a1")
    bench.report("b1", 0)
    agree(bench, "a0")
    assert holders(bench) == {(0, 0): "a0", (0, 1): "b1"}
    assert not any("computed again" in note.text for note in bench.commands(Note, bench.log))
    bench.report("a0", 1)
    bench.tick(2.0)
    assert bench.sent("a0", Close, bench.log), "its stage is complete"


def test_a_boundary_whose_audits_end_as_one_side_leaves_delays_no_stage() -> None:
    bench = broken()
    agree(bench, "a0")
    bench.lose("a1")
    bench.report("a0", 1)
    bench.tick(2.0)
    assert bench.sent("a0", Close, bench.log), "its stage is complete"


def test_the_audit_of_a_peer_that_has_left_does_not_delay_its_stage() -> None:
    bench = audited(settings=AuditSettings(0.5, 0), draw=draws(0.0, 0.9))
    bench.report("a0", 0)
    assert the_order(bench)[1].peer == "a0"
    bench.lose("a0")
    bench.report("b0", 0, 1)
    bench.tick(2.0)
    assert bench.close_of("b0").committed == (0, 1)


def test_the_side_that_told_the_truth_keeps_its_cell_and_is_charged_nothing() -> None:
    bench = broken()
    bench.tick(3.0)
    agree(bench, "a0")
    lose(bench, "a1")
    assert [record.peer for record in bench.records(VerdictRecord)] == ["a1"]
    assert holders(bench) == {(0, 0): "a0"}
    assert not bench.sent("a0", Drop, bench.log)
    assert bench.run.held_time.seconds(PeerId("a0"), bench.now) == 0.0


def test_a_broken_chain_is_not_averaged_although_no_auditor_answers_in_time() -> None:
    bench = broken()
    bench.report("a0", 1)
    bench.report("a1", 1)
    bench.tick(3.0 * deadlines.HOLD_SECONDS + 1.0)
    assert (0, 0) in holders(bench), "audits of a boundary in doubt have four times as long"
    bench.tick(60.0)
    assert holders(bench) == {(1, 0): "a0", (1, 1): "a1"}
    assert bench.run.phase is RunPhase.COLLECT


def test_a_stage_does_not_average_while_the_other_side_of_its_boundary_is_in_doubt() -> None:
    bench = broken()
    agree(bench, "a0")
    bench.report("a0", 1)
    bench.tick(2.0)
    assert not bench.sent("a0", Close, bench.log)


def broken_on_both_sides(*order: str) -> Bench:
    """a1 has computed from tensors that neither a0 nor a2 knows; they count in this order."""
    names = ("a0", "b0", "c0", "a1", "b1", "a2", "b2", "c2")
    bench = audited(*names, settings=NO_CELL, stages=3)
    for peer in order:
        if peer == "a1":
            transcript = simulated_transcript(
                Step(1), MicrobatchIndex(7), StageIndex(1), StageIndex(2)
            )
        else:
            transcript = bench.receipt(peer, 0).transcript
        receipt = bench.receipt(peer, 0, transcript=transcript)
        bench.event(ReceiptsVerified(bench.session(peer), PeerId(peer), (receipt,)))
    return bench


def test_a_chain_that_is_broken_on_both_sides_of_a_stage_is_computed_again() -> None:
    """An audit alone does not show it: the auditor gets the made-up inputs, and agrees."""
    bench = broken_on_both_sides("a2", "a1", "a0")
    agree(bench, "a2")
    agree(bench, "a1")
    assert not bench.step().table
    assert bench.sent("a1", Drop, bench.log)[-1].microbatches == (0,)
    dropped(bench, "a0")
    bench.report("a0", 0, 1)
    bench.tick(2.0)
    assert bench.close_of("a0").committed == (0, 1), "its stage is complete, and fits"


@pytest.mark.parametrize("order", [("a2", "a1", "a0"), ("a0", "a2", "a1")], ids=" ".join)
@pytest.mark.parametrize(("lost", "other"), [("a0", "a2"), ("a2", "a0")])
@pytest.mark.parametrize("middle_is_last", [False, True])
def test_a_lost_audit_on_one_side_of_a_stage_does_not_settle_the_other_side(
    order: tuple[str, ...], lost: str, other: str, middle_is_last: bool
) -> None:
    bench = broken_on_both_sides(*order)
    lose(bench, lost)
    for peer in (other, "a1") if middle_is_last else ("a1", other):
        assert len(holders(bench)) == 2
        agree(bench, peer)
    assert not holders(bench)


def test_a_peer_that_contradicts_itself_is_in_no_dispute_with_itself() -> None:
    """It has averaged in one stage, and holds another one since."""
    bench = joined("a0", "b0", "a1", limits={"receipt_interval_seconds": 0.0})
    bench.report("a0", 0)
    bench.report("b0", 1)
    bench.report("a1", 0, 1)
    bench.averaged("a0")
    bench.averaged("b0")
    bench.lose("b0")
    bench.lose("a1")
    bench.join("b0", 1)
    bench.tick(3.0)
    bench.report_broken("b0", 1, "input")
    agree(bench, "b0")
    assert any("contradict each other" in note.text for note in bench.commands(Note, bench.log))
    assert not bench.run.held_time.account(PeerId("b0")).disputes


# ---------------------------------------------------------------- what is taken out


def test_a_dropped_microbatch_counts_again_when_its_peer_has_taken_it_out() -> None:
    bench = audited("a0", "a1", settings=NO_CELL)
    bench.report("a0", 0)
    bench.report_broken("a1", 0, "input")
    bench.report("a0", 0)
    assert not bench.step().table, "it may be the receipt of what is being taken out"
    dropped(bench, "a0")
    bench.report("a0", 0)
    assert bench.step().table.held_by(PeerId("a0"))
    again = [m for lease in bench.sent("a0", Lease, bench.log) for m in lease.microbatches]
    assert again


def test_a_peer_that_returns_is_sent_its_drops_again() -> None:
    bench = audited("a0", "b0", "a1", settings=NO_CELL)
    bench.report("a0", 0)
    bench.report_broken("a1", 0, "input")
    ((auditor, order),) = orders_of_log(bench)
    bench.audited(auditor, order, None)
    assert bench.sent("a0", Drop, bench.log)
    bench.attach("a0", stage=StageIndex(0), digest="d")
    assert bench.sent("a0", Drop)[-1].microbatches == (0,)


@pytest.mark.parametrize("changes", [{"input_gradient": OTHER_DIGEST}, {"output_gradient": ""}])
def test_a_receipt_without_the_digests_of_its_stage_does_not_count(
    changes: dict[str, str],
) -> None:
    bench = audited("a0", "a1")
    bad = bench.receipt("a0", 0).transcript.model_copy(update=changes)
    receipt = bench.receipt("a0", 0, transcript=bad)
    bench.event(ReceiptsVerified(bench.session("a0"), PeerId("a0"), (receipt,)))
    assert not bench.step().table


def test_a_receipt_that_a_trainer_kept_of_what_was_taken_out_does_not_count() -> None:
    bench = audited("a0", "a1", settings=NO_CELL)
    kept = bench.receipt("a0", 0)
    bench.report("a0", 0)
    bench.report_broken("a1", 0, "input")
    dropped(bench, "a0")
    bench.resolve("a1", 0, 0, receipts=(kept,))
    assert not holders(bench)
    bench.report("a0", 0)
    assert holders(bench) == {(0, 0): "a0"}


def test_what_a_peer_has_taken_out_of_no_step_in_progress_is_ignored() -> None:
    bench = audited("a0", "a1", settings=NO_CELL)
    bench.report("a0", 0)
    dropped(bench, "a0", step=7)
    assert holders(bench) == {(0, 0): "a0"}
