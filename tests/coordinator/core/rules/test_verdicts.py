"""Verdicts: which cells are audited, by which peers, and what follows."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kits.swarm_world.audit_bench import (
    ALL_CELLS,
    audited,
    contradict,
    draws,
    false,
    no_answer,
    orders,
    orders_of_log,
    the_order,
    true,
)
from kits.swarm_world.event_bench import OTHER_DIGEST, Bench, joined
from kits.swarm_world.facts import Options, train_loss
from kits.swarm_world.sweep import Course, finish
from swarm_coordinator.core.events import (
    Ban,
    CloseSession,
    EvaluationRecord,
    Note,
    ReceiptsVerified,
    Restored,
    Send,
    StandingRecord,
    StandingsRecord,
    VerdictRecord,
)
from swarm_coordinator.core.rules import held_up
from swarm_coordinator.core.rules.auditing import deadlines, verdicts
from swarm_coordinator.core.rules.auditing.auditors import AUDIT_SECONDS
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.utilisation import Rejection
from swarm_coordinator.core.trust.audits import MAX_IN_HAND, AuditBook, AuditSettings
from swarm_coordinator.core.trust.samples import SampledTokens
from swarm_coordinator.core.trust.showing import showing_seconds
from swarm_coordinator.simulator.transcripts import simulated_transcript
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step, Version
from swarm_shared.protocol import (
    Audit,
    Close,
    Drop,
    Dropped,
    Refused,
    Welcome,
)
from swarm_shared.trust.votes import Claim

# ---------------------------------------------------------------- draws


def test_a_counted_cell_is_audited_by_a_peer_of_its_stage_and_not_by_itself() -> None:
    bench = audited()
    bench.report("a0", 0)
    auditor, order = the_order(bench)
    assert auditor in ("b0", "c0")
    assert (order.peer, order.microbatch, order.stage) == ("a0", 0, 0)
    assert (order.input, order.output_gradient) == (true(order).input, true(order).output_gradient)
    assert order.comparison is None


def test_the_order_names_the_targets_at_the_last_stage_only() -> None:
    bench = audited()
    bench.report("a0", 0)
    assert the_order(bench)[1].targets == ""
    bench = audited()
    bench.report("a1", 0)
    _, order = the_order(bench)
    assert order.stage == 1
    assert order.targets == true(order).output


def test_a_draw_above_the_share_audits_nothing() -> None:
    bench = audited(settings=AuditSettings(0.02, 0), draw=lambda: 0.021)
    bench.report("a0", 0)
    assert not orders(bench)


def test_an_owner_without_a_passed_audit_for_too_long_is_audited_in_one_cell_at_a_time() -> None:
    bench = audited(
        "a0", "b0", "a1", settings=AuditSettings(0.75, 0), draw=lambda: 0.8, microbatches=8
    )
    for microbatch in range(3):
        bench.report("a0", microbatch)
        assert not orders(bench)
    bench.report("a0", 3)
    auditor, order = the_order(bench)
    bench.report("a0", 4)
    assert not orders(bench), "one is being audited"
    no_answer(bench, auditor, order)
    bench.report("a1", 3)
    no_answer(bench, *the_order(bench))
    assert bench.run.audits.unanswered == 1
    bench.report("a0", 5)
    bench.report("a1", 5)
    auditor, order = the_order(bench)
    bench.audited(auditor, order, true(order))
    bench.report("a0", 6)
    assert not orders(bench), "one has passed"


def test_all_auditors_of_a_receipt_compare_the_same_blocks_of_its_gradient() -> None:
    """Otherwise one could find a difference that another one does not see, and lose by it."""
    lots = random.Random(5)
    samples = []
    for _ in range(2):
        bench = audited("a0", "b0", "c0", "a1", draw=lots.random)
        bench.report("a0", 0)
        contradict(bench, *the_order(bench))
        contradict(bench, *the_order(bench))
        sent = [one.message for one in bench.commands(Send, bench.log)]
        compared = [one.comparison for one in sent if isinstance(one, Audit)]
        assert [one is not None for one in compared] == [False, True] * 2
        samples.append([one.sample for one in compared if one is not None])
    assert all(len(set(sample)) == 1 for sample in samples)
    assert samples[0] != samples[1]


def test_devices_of_one_owner_do_not_audit_each_other() -> None:
    bench = audited("a0", "a1")
    bench.join("b0", 0)
    bench.join("c0", 0, owner=PeerId("a0"))
    bench.report("a0", 0)
    assert the_order(bench)[0] == "b0"
    bench.lose("b0")
    bench.report("a0", 1)
    assert not orders(bench)


def test_a_paused_or_leaving_peer_audits_nothing() -> None:
    bench = audited("a0", "b0", "a1")
    bench.pause("b0")
    bench.report("a0", 0)
    assert not orders(bench)


def test_a_trusted_owner_is_asked_first() -> None:
    settings = AuditSettings(1.0, 0, trusted_owners=frozenset({PeerId("c0")}))
    bench = audited(settings=settings, draw=lambda: 0.5)
    bench.report("a0", 0)
    assert the_order(bench)[0] == "c0"


def test_an_auditor_has_no_more_than_so_many_in_hand_and_gets_the_next_when_it_answers() -> None:
    bench = audited("a0", "b0", "a1", microbatches=MAX_IN_HAND + 2)
    bench.report("a0", *range(MAX_IN_HAND + 2))
    in_hand = orders(bench)["b0"]
    assert len(in_hand) == MAX_IN_HAND
    bench.audited("b0", in_hand[0], true(in_hand[0]))
    assert the_order(bench)[1].microbatch == MAX_IN_HAND


# ---------------------------------------------------------------- answers


def test_equal_digests_pass_and_the_step_goes_on() -> None:
    bench = audited("a0", "b0", "a1", "b1")
    bench.fill()
    for auditor, sent in orders_of_log(bench):
        bench.audited(auditor, sent, true(sent))
    bench.event_tick()
    assert bench.run.phase is RunPhase.CLOSING
    assert bench.run.audits.passed == 4
    assert bench.run.audits.standings.get(PeerId("a0")).passed == 2


def test_a_complete_step_waits_for_its_audits_up_to_a_limit() -> None:
    bench = audited("a0", "b0", "a1", "b1")
    bench.fill()
    assert bench.run.phase is RunPhase.COLLECT
    bench.tick(deadlines.HOLD_SECONDS / 2)
    assert bench.run.phase is RunPhase.COLLECT
    bench.tick(10.0)
    assert bench.run.phase is RunPhase.CLOSING
    assert bench.run.audits.unanswered == 4


def comparing(bench: Bench) -> tuple[str, Audit]:
    """Microbatch 0 of a0 is audited by a peer that has stated other digests, and compares now; the
    table is complete."""
    bench.report("a0", 0)
    auditor, order = the_order(bench)
    bench.audited(auditor, order, false(order))
    compares = the_order(bench)
    bench.report("a1", 0)
    return compares


def test_an_auditor_that_compares_also_waits_for_the_audited_peer_and_the_close_for_both() -> None:
    bench = audited("a0", "b0", "c0", "a1", microbatches=1)
    _, order = comparing(bench)
    assert order.comparison is not None
    assert order.comparison.seconds == AUDIT_SECONDS / 2
    bench.tick(1.5 * AUDIT_SECONDS - 0.5)
    assert bench.run.phase is RunPhase.COLLECT
    assert not orders(bench), "no other one is asked"
    bench.tick(1.0)
    sent = [order for found in orders(bench).values() for order in found]
    newest = max(sent, key=lambda order: order.audit)
    assert newest.sources is not None, "it begins anew, hidden"


def test_the_audited_peer_has_the_time_that_showing_takes_over_the_slowest_uplink() -> None:
    bench = audited("a0", "b0", "c0", "a1", microbatches=1)
    wide = bench.run.manifest.model.model_copy(update={"intermediate_size": 100_000})
    bench.run.manifest = bench.run.manifest.model_copy(update={"model": wide})
    _, order = comparing(bench)
    assert order.comparison is not None
    seconds = showing_seconds(bench.run.manifest, StageIndex(0), 0.0)
    assert order.comparison.seconds == seconds > AUDIT_SECONDS


def is_silent(bench: Bench, peer: str) -> bool:
    return bench.run.audits.standings.get(PeerId(peer)).silent


@pytest.mark.parametrize("answer", ["", "nothing", "another microbatch"])
def test_an_auditor_with_other_digests_and_no_distance_is_asked_last(answer: str) -> None:
    bench = audited("a0", "b0", "c0", "a1", microbatches=4)
    auditor, order = comparing(bench)
    if answer == "nothing":
        no_answer(bench, auditor, order)
    elif answer:
        bench.audited(auditor, order, false(order), microbatch=MicrobatchIndex(3), distance=1.0)
    else:
        bench.tick(1.5 * AUDIT_SECONDS + 0.5)
    assert is_silent(bench, auditor)
    bench.report("a0", 1, 2)
    other = ({"b0", "c0"} - {auditor}).pop()
    asked = {peer: len(sent) for peer, sent in orders(bench).items()}
    assert asked == {other: 2}


def test_an_auditor_that_compares_is_not_silent_any_more() -> None:
    bench = audited("a0", "b0", "a1", microbatches=1)
    bench.run.audits.standings.kept(PeerId("b0")).silent = True
    auditor, order = comparing(bench)
    bench.audited(auditor, order, false(order), distance=1.0)
    assert not is_silent(bench, "b0")


def test_no_close_waits_for_an_auditor_that_was_silent() -> None:
    """Otherwise it could hold up each step for as long as showing takes."""
    bench = audited("a0", "b0", "a1", microbatches=1)
    bench.run.audits.standings.kept(PeerId("b0")).silent = True
    comparing(bench)
    bench.tick(deadlines.HOLD_SECONDS + 0.1)
    (order,) = [order for found in orders(bench).values() for order in found]
    assert order.sources is not None, "it begins anew, hidden"


def test_within_the_tolerance_an_unlike_machine_passes() -> None:
    bench = audited()
    bench.report("a0", 0)
    contradict(bench, *the_order(bench), distance=1e-5)
    assert bench.run.audits.passed == 1
    assert (MicrobatchIndex(0), StageIndex(0)) in bench.step().table


def test_the_odd_one_of_three_loses_its_cells_its_place_and_its_credit() -> None:
    bench = audited()
    bench.report("a0", 0)
    contradict(bench, *the_order(bench))
    second, order = the_order(bench)
    assert second in ("b0", "c0")
    contradict(bench, second, order)
    (record,) = bench.records(VerdictRecord)
    assert (record.peer, record.owner, record.microbatch, record.stage) == ("a0", "a0", 0, 0)
    statements = sorted(one.statement for one in record.evidence.statements)
    assert statements == ["signed by b0", "signed by c0"]
    assert (record.evidence.entitled, record.evidence.tolerance) == (3, ALL_CELLS.tolerance)
    assert record.claim == Claim(true(order), None)
    assert "microbatch 0 of step 1 in stage 0" in record.reason
    assert "a0" not in bench.run.peers
    assert not bench.step().table
    refused = bench.sent("a0", Refused, bench.log)[-1]
    assert "microbatch 0 of step 1 in stage 0" in refused.reason
    assert "swarm-client doctor --self-test" in refused.reason
    assert refused.self_test
    (standing,) = [
        s for r in bench.records(StandingsRecord) for s in r.standings if s.owner == "a0"
    ]
    assert (standing.passed, standing.lost) == (0, 1)
    assert not bench.commands(Ban, bench.log)


def test_the_evidence_has_the_bindings_that_the_audited_peer_and_its_auditors_have_shown() -> None:
    bench = audited("b0", "c0", "a1")
    for device in ("x0", "y0"):
        owner = PeerId(f"owner of {device}")
        bench.join(device, 0, owner=owner, owner_binding=f"for {device}")
    bench.lose("c0")
    bench.report("x0", 0)
    for _ in range(2):
        contradict(bench, *the_order(bench))
    (record,) = bench.records(VerdictRecord)
    shown_by = (record.peer, record.owner, record.evidence.binding)
    assert shown_by == ("x0", "owner of x0", "for x0")
    shown = {one.statement: one.binding for one in record.evidence.statements}
    assert shown == {"signed by b0": "", "signed by y0": "for y0"}


def test_the_status_lists_owners_and_verdicts() -> None:
    bench = audited()
    bench.report("a0", 0)
    contradict(bench, *the_order(bench))
    contradict(bench, *the_order(bench))
    trust = bench.status().trust
    assert (trust.lost, trust.probation_cells, trust.on_probation) == (1, 0, 0)
    first, *others = trust.owners
    assert (first.owner, first.passed, first.lost) == ("a0", 0, 1)
    assert [(one.owner, one.made) for one in others] == [("b0", 1), ("c0", 1)]
    assert [(one.peer, one.step) for one in trust.verdicts] == [("a0", 1)]


def test_an_expelled_owner_is_refused_for_an_hour_with_the_reason() -> None:
    bench = audited()
    bench.report("a0", 0)
    contradict(bench, *the_order(bench))
    contradict(bench, *the_order(bench))
    bench.attach("a0")
    (refused,) = bench.sent("a0", Refused)
    assert "microbatch 0 of step 1" in refused.reason
    assert refused.retry_seconds == verdicts.REFUSED_SECONDS
    bench.attach("x0", owner=PeerId("a0"))
    assert bench.sent("x0", Refused)
    bench.tick(1.0)
    bench.now += verdicts.REFUSED_SECONDS
    bench.attach("a0")
    assert not bench.sent("a0", Refused)


def test_a_rest_that_is_due_does_not_shorten_the_refusal_for_a_lost_audit() -> None:
    bench = audited()
    for _ in range(2):
        held_up.record_held_up_alone(bench.run, bench.peer("a0"), bench.now)
    bench.report("a0", 0)
    contradict(bench, *the_order(bench))
    contradict(bench, *the_order(bench))
    bench.tick(1.0)
    bench.attach("a0")
    (refused,) = bench.sent("a0", Refused)
    assert "microbatch 0 of step 1" in refused.reason
    assert refused.retry_seconds == verdicts.REFUSED_SECONDS - 1.0


def test_the_second_lost_audit_bans_the_owner() -> None:
    start = restored_with(StandingRecord(PeerId("a0"), 60, 1, Step(0), 0))
    bench = Bench(start, audits=AuditBook(ALL_CELLS, lambda: 0.0))
    bench.now += 60.0
    bench.join_all("a0", "b0", "c0", "a1", "b1", "c1")
    bench.report("a0", 0)
    contradict(bench, *the_order(bench))
    contradict(bench, *the_order(bench))
    (ban,) = bench.commands(Ban, bench.log)
    assert ban.owner == "a0"
    assert [one.self_test for one in bench.sent("a0", Refused, bench.log)] == [False]


def back(bench: Bench, peer: str, owner: str) -> None:
    """A holder of stage 0 attaches again as a device of another owner."""
    bench.attach(
        peer, owner=PeerId(owner), owner_binding=f"of {owner}", stage=StageIndex(0),
        version=Version(0), self_tested=True,
    )  # fmt: skip


def test_a_device_that_shows_another_owner_each_time_is_banned_with_its_second_lost_audit() -> None:
    bench = audited("b0", "c0", "a1")
    bench.join("x0", 0, owner=PeerId("first"), owner_binding="of first")
    for owner in ("first", "second"):
        back(bench, "x0", owner)
        bench.report("x0", 0)
        contradict(bench, *the_order(bench))
        contradict(bench, *the_order(bench))
        bench.tick(1.0)
    assert [record.owner for record in bench.records(VerdictRecord)] == ["first", "second"]
    assert [ban.owner for ban in bench.commands(Ban, bench.log)] == ["x0"]


def test_a_device_has_one_vote_in_an_audit_whatever_owners_it_shows() -> None:
    bench = audited("a0", "b0", "a1")
    bench.join("x0", 0, owner=PeerId("first"), owner_binding="of first")
    bench.pause("b0")
    bench.report("a0", 0)
    auditor, order = the_order(bench)
    assert auditor == "x0"
    bench.resume("b0")
    contradict(bench, auditor, order)
    assert the_order(bench)[0] == "b0", "which is slow"
    back(bench, "x0", "second")
    bench.tick(8.0)
    asked = [order for order in bench.sent("x0", Audit, bench.log) if order.comparison is None]
    assert len(asked) == 1


def test_an_order_ends_when_its_auditor_shows_another_owner() -> None:
    """A vote for the audited owner would spoil the evidence, and its verdict not be provable."""
    bench = audited("b0", "c0", "a1")
    for device, owner in (("x0", "first"), ("y0", "second")):
        bench.join(device, 0, owner=PeerId(owner), owner_binding=f"of {owner}")
    bench.pause("b0", "c0")
    bench.report("x0", 0)
    auditor, order = the_order(bench)
    assert auditor == "y0"
    for peer in ("b0", "c0"):
        bench.resume(peer)
    back(bench, "y0", "first")
    assert the_order(bench)[0] in ("b0", "c0"), "another one is asked at once"
    bench.audited("y0", order, false(order))
    assert not orders(bench)
    (audit,) = bench.step().audits.open.values()
    assert not audit.votes


def test_an_owner_that_passes_its_self_test_is_back_at_once_on_probation() -> None:
    bench = audited(settings=AuditSettings(audit_share=0.01, probation_cells=2))
    bench.run.audits.standings.change(PeerId("a0")).passed = 2
    assert bench.run.audits.share(PeerId("a0")) == 0.01
    bench.report("a0", 0)
    contradict(bench, *the_order(bench))
    contradict(bench, *the_order(bench))
    assert "a0" not in bench.run.peers
    bench.attach("a0", self_tested=True)
    assert bench.sent("a0", Welcome)
    assert bench.run.audits.share(PeerId("a0")) > 0.01


def restored_with(*standings: StandingRecord) -> Any:
    return Restored(1, Version(0), None, None, False, None, standings=standings)


def test_an_auditor_that_contradicts_the_majority_loses() -> None:
    bench = audited()
    bench.report("a0", 0)
    liar, order = the_order(bench)
    contradict(bench, liar, order)
    honest, second = the_order(bench)
    bench.audited(honest, second, true(second))
    (record,) = bench.records(VerdictRecord)
    assert record.peer == liar
    assert liar not in bench.run.peers
    assert bench.step().table[MicrobatchIndex(0), StageIndex(0)].peer == "a0"
    assert bench.run.audits.passed == 1


def test_a_lie_is_counted_once_however_many_audits_find_it() -> None:
    bench = audited(microbatches=3)
    bench.report("a0", 0, 1, 2)
    for _ in range(20):
        waiting = [
            (str(a.order.auditor), a.order.audit, a.order.compares)
            for a in bench.step().audits.open.values()
            if a.order is not None
        ]
        if not waiting:
            break
        auditor, number, compares = waiting[0]
        (order,) = [o for o in bench.sent(auditor, Audit, bench.log) if o.audit == number]
        bench.audited(auditor, order, false(order), distance=1.0 if compares else None)
    assert len(bench.records(VerdictRecord)) == 1
    assert bench.run.audits.standings.get(PeerId("a0")).lost == 1
    assert not bench.commands(Ban, bench.log)


def test_two_owners_that_contradict_each_other_are_both_charged_and_the_cell_is_cleared() -> None:
    bench = audited("a0", "b0", "a1", "b1")
    bench.report("a0", 0)
    bench.tick(3.0)
    contradict(bench, "b0", bench.sent("b0", Audit, bench.log)[0])
    assert not bench.records(VerdictRecord)
    assert (MicrobatchIndex(0), StageIndex(0)) not in bench.step().table
    assert bench.sent("a0", Drop, bench.log)[-1].microbatches == (0,)
    held = bench.run.held_time
    assert held.seconds(PeerId("a0"), bench.now) == held.seconds(PeerId("b0"), bench.now) > 2.0


@pytest.mark.parametrize(
    ("is_given", "found"), [(True, "contradict"), (False, "got no tensors from")]
)
def test_a_cell_on_which_no_majority_decides_is_noted_with_what_its_auditors_met(
    is_given: bool, found: str
) -> None:
    bench = audited("a0", "b0", "a1")
    bench.report("a0", 0)
    auditor, order = the_order(bench)
    if is_given:
        contradict(bench, auditor, order)
    else:
        bench.audited(auditor, order, None)
    (note,) = [note.text for note in bench.commands(Note) if "computed again" in note.text]
    assert f"its auditors {found} …a0, and no majority decides" in note


def test_an_auditor_that_agrees_is_charged_nothing_where_no_majority_decides() -> None:
    bench = audited("a0", "b0", "c0", "d0", "a1")
    bench.report("a0", 0)
    accuser, order = the_order(bench)
    bench.tick(3.0)
    contradict(bench, accuser, order)
    agreeing, order = the_order(bench)
    bench.audited(agreeing, order, true(order))
    no_answer(bench, *the_order(bench))
    assert not bench.step().table
    held = {peer: bench.run.held_time.seconds(PeerId(peer), bench.now) for peer in bench.run.peers}
    assert held["a0"] == held[accuser] > 2.0
    assert held[agreeing] == 0.0


def test_an_accuser_that_has_left_is_no_party_to_a_dispute() -> None:
    bench = audited()
    bench.report("a0", 0)
    accuser, order = the_order(bench)
    bench.tick(3.0)
    contradict(bench, accuser, order)
    other, order = the_order(bench)
    bench.lose(accuser)
    no_answer(bench, other, order)
    assert not bench.step().table
    assert bench.run.held_time.seconds(PeerId("a0"), bench.now) == 0.0


def test_a_made_up_loss_is_a_lie() -> None:
    bench = audited()
    bench.report("a1", 0)
    for _ in range(2):
        auditor, order = the_order(bench)
        bench.audited(auditor, order, true(order), loss_sum=1e6)
    assert [record.peer for record in bench.records(VerdictRecord)] == ["a1"]


def test_a_peer_without_inputs_loses_what_it_counted_and_sits_the_step_out() -> None:
    bench = audited(draw=draws(0.0, 0.5))
    bench.report("a0", 0, 1)
    for _ in range(2):
        sent = [(a, o) for a, found in orders(bench).items() for o in found if o.microbatch == 0]
        bench.audited(sent[0][0], sent[0][1], None)
    assert not bench.step().table.held_by(PeerId("a0"))
    assert "a0" in bench.run.peers
    dropped = {m for drop in bench.sent("a0", Drop, bench.log) for m in drop.microbatches}
    assert dropped == {0, 1}
    assert not bench.records(VerdictRecord)
    # Otherwise the same microbatch would be leased to it again, and the step would not end.
    assert bench.run.peers.excluded == {PeerId("a0")}
    assert "a0" not in {peer.peer for peer in bench.run.peers.ready(StageIndex(0))}


def test_a_peer_without_inputs_is_charged_for_the_time_of_its_audit_and_that_is_noted() -> None:
    bench = audited()
    bench.report("a0", 0)
    auditor, order = the_order(bench)
    bench.tick(3.0)
    bench.audited(auditor, order, None)
    bench.audited(*the_order(bench), None)
    assert bench.run.held_time.seconds(PeerId("a0"), bench.now) == pytest.approx(3.0)
    cell = "microbatch 0 of step 1 in stage 0"
    notes = [note.text for note in bench.commands(Note, bench.log)]
    assert any(f"gave its auditors no tensors of {cell}" in note for note in notes)


def test_an_owner_whose_devices_give_no_inputs_in_one_step_is_counted_once_for_it() -> None:
    bench = audited("b0", "c0", "a1")
    owner = PeerId("owner")
    for device in ("x0", "y0"):
        bench.join(device, 0, owner=owner)
    bench.run.audits.standings.change(owner).withheld = verdicts.MAX_WITHHELD - 1
    for microbatch, device in enumerate(("x0", "y0")):
        bench.report(device, microbatch)
        for _ in range(2):
            bench.audited(*the_order(bench), None)
    assert bench.run.audits.standings.get(owner).withheld == verdicts.MAX_WITHHELD
    assert {"x0", "y0"} <= bench.run.peers.keys()


def test_no_self_test_brings_an_owner_back_that_went_on_giving_no_inputs() -> None:
    """Not even one that had lost an audit before and has passed a self-test since."""
    bench = audited()
    standing = bench.run.audits.standings.change(PeerId("a0"))
    standing.lost, standing.withheld = 1, verdicts.MAX_WITHHELD
    bench.report("a0", 0)
    for _ in range(2):
        auditor, order = the_order(bench)
        bench.audited(auditor, order, None)
    (refused,) = bench.sent("a0", Refused, bench.log)
    assert ("gave its auditors no tensors" in refused.reason, refused.self_test) == (True, False)
    bench.attach("a0", self_tested=True)
    assert [one.self_test for one in bench.sent("a0", Refused)] == [False]


def test_an_answer_that_was_not_asked_for_is_ignored() -> None:
    bench = audited()
    bench.report("a0", 0)
    auditor, order = the_order(bench)
    other = "b0" if auditor == "c0" else "c0"
    bench.audited(other, order, None)
    bench.audited(auditor, order.model_copy(update={"audit": 999}), None)
    (audit,) = bench.step().audits.open.values()
    assert not audit.votes


def test_a_statement_about_another_cell_is_no_vote_and_another_auditor_is_asked() -> None:
    bench = audited()
    bench.report("a0", 0)
    auditor, order = the_order(bench)
    bench.audited(auditor, order, true(order), microbatch=MicrobatchIndex(1))
    assert the_order(bench)[0] != auditor


def test_a_silent_auditor_is_replaced() -> None:
    bench = audited()
    bench.report("a0", 0)
    first, _ = the_order(bench)
    for _ in range(8):
        bench.tick(1.0)
        if orders(bench):
            break
    assert the_order(bench)[0] != first


def test_an_auditor_that_is_lost_is_replaced() -> None:
    bench = audited()
    bench.report("a0", 0)
    first, _ = the_order(bench)
    bench.lose(first)
    bench.event_tick()
    assert {p for p, _ in orders_of_log(bench)} == {"b0", "c0"} - {first}


# ---------------------------------------------------------------- standings


def test_standings_are_stored_with_the_step() -> None:
    bench = audited("a0", "b0", "a1", "b1")
    bench.fill()
    for auditor, order in orders_of_log(bench):
        bench.audited(auditor, order, true(order))
    bench.event_tick()
    bench.average_all()
    (record,) = bench.records(StandingsRecord)
    by_owner = {standing.owner: standing for standing in record.standings}
    assert by_owner[PeerId("a0")].passed == 2
    assert by_owner[PeerId("a0")].vested_step == 1
    assert by_owner[PeerId("b0")].audited_work == 2


def test_close_and_expulsion_compose() -> None:
    """A peer whose audit is lost while the step is complete leaves before the close begins."""
    bench = audited()
    bench.fill()
    for auditor, order in orders_of_log(bench):
        if order.peer == "a0" and order.microbatch == 0:
            contradict(bench, auditor, order)
            contradict(bench, *the_order(bench))
            break
    assert bench.run.phase is RunPhase.COLLECT
    assert "a0" not in bench.run.peers
    assert not bench.sent("b0", Close, bench.log)
    assert any(c.peer == "a0" for c in bench.commands(CloseSession, bench.log))


# ---------------------------------------------------------------- whole runs


@pytest.mark.parametrize("seed", range(6))
def test_a_run_with_liars_counts_no_lie_and_refuses_no_honest_peer(seed: int) -> None:
    options = Options(
        stages=1 + seed % 3, peers=5 * (1 + seed % 3), microbatches=3, steps=3, audit_share=1.0,
        starting=3, staleness=0 if seed % 2 else 1, liars=1,
    )  # fmt: skip
    world = Course(options, seed).world()
    finish(world)  # a lie in a sum, or an honest peer that is refused, is a Violation
    lost = [world.peers[r.peer] for r in world.store.records if isinstance(r, VerdictRecord)]
    assert all(peer.lies for peer in lost)


# ---------------------------------------------------------------- the sampler's tokens


def test_receipts_of_other_data_do_not_count_and_their_peer_takes_them_out() -> None:
    def tokens(step: Step, microbatch: MicrobatchIndex) -> SampledTokens:
        first, last = (
            simulated_transcript(step, microbatch, StageIndex(s), StageIndex(1)) for s in (0, 1)
        )
        return SampledTokens(first.input, last.output)

    bench = joined("a0", "a1", audits=AuditBook(AuditSettings(0.0, 0), lambda: 0.5, tokens))
    for peer, field in (("a0", "input"), ("a1", "output")):
        other = bench.receipt(peer, 0).transcript.model_copy(update={field: OTHER_DIGEST})
        receipt = bench.receipt(peer, 0, transcript=other)
        bench.event(ReceiptsVerified(bench.session(peer), PeerId(peer), (receipt,)))
        assert not bench.step().table.held_by(PeerId(peer))
        assert bench.sent(peer, Drop)[-1].microbatches == (0,)
        bench.report(peer, 1)
    assert bench.step().table.filled(MicrobatchIndex(1)) == 2
    assert bench.run.statistics.utilisation.rejected == {Rejection.OTHER_DATA: 2}
    bench.send("a0", Dropped(step=Step(1), stage=StageIndex(0), microbatches=(MicrobatchIndex(0),)))
    bench.report("a0", 0)
    assert bench.step().table.held_by(PeerId("a0"))


# ---------------------------------------------------------------- the evaluation


def test_a_held_out_loss_is_audited_and_a_false_one_is_not_published() -> None:
    lots = [1.0]
    bench = audited("a0", "a1", "b1", "c1", draw=lambda: lots[0], steps=1, evaluation=1)
    bench.one_step()
    lots[0] = 0.0
    assert bench.run.phase is RunPhase.EVALUATING
    bench.report("a0", 2)
    made_up = bench.receipt("a1", 2, loss_sum=0.5)
    bench.event(ReceiptsVerified(bench.session("a1"), PeerId("a1"), (made_up,)))
    assert bench.run.history.heldout_loss is None
    auditor, order = the_order(bench)
    bench.audited(auditor, order, true(order))
    second, order = the_order(bench)
    assert {auditor, second} == {"b1", "c1"}
    bench.audited(second, order, true(order))
    assert "a1" not in bench.run.peers
    assert not bench.records(EvaluationRecord)
    bench.report("b1", 2)
    auditor, order = the_order(bench)
    bench.audited(auditor, order, true(order))
    assert [r.heldout_loss for r in bench.records(EvaluationRecord)] == [train_loss(2, 2) / 4]
