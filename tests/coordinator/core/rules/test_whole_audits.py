"""Whole audits: all cells of a member, and what it puts into the average, at one seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kits.scalar_sums import audited, stated
from kits.swarm_world.event_bench import OTHER_DIGEST, Bench, joined
from kits.swarm_world.facts import Options, Violation
from kits.swarm_world.sums import SumLie
from kits.swarm_world.sweep import run_to_the_end
from kits.swarm_world.world import World
from swarm_coordinator.core.events import SumsStated, VerdictRecord
from swarm_coordinator.core.rules import held_up
from swarm_coordinator.core.rules.auditing.auditors import AUDIT_SECONDS
from swarm_coordinator.core.rules.auditing.cleared_cells import clear_cell
from swarm_coordinator.core.rules.closing import whole_audits
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.trust.audits import AuditBook, AuditSettings
from swarm_coordinator.core.trust.sums import RoundSums
from swarm_coordinator.core.trust.whole_audits import WholeAudit
from swarm_coordinator.simulator.transcripts import simulated_transcript
from swarm_shared.base.types import (
    CHECKS_PER_SECRET,
    Generation,
    MicrobatchIndex,
    PeerId,
    RunId,
    StageIndex,
    Version,
)
from swarm_shared.identity.linear_digest import check_seed, to_text
from swarm_shared.identity.work_statements import SumStatement
from swarm_shared.protocol import AbortRound, Audit, Close, Refused, RoundReport, SumCheck

WHOLE = AuditSettings(audit_share=2.0, probation_cells=0, check_sums=True)
"""Every cell and every member is drawn."""

GRADIENTS = {0: 5, 1: 8}
"""Digests of the gradients of the microbatches."""


def other_each_time() -> Callable[[], float]:
    """Draws of which no two are alike, so that no two secrets are."""
    numbers = iter(range(1, 100_000))
    return lambda: next(numbers) / 100_000


def filled(
    *names: str, settings: AuditSettings = WHOLE, draw: Callable[[], float] | None = None,
    **options: Any,
) -> Bench:  # fmt: skip
    """A run of one stage in which a0 has counted both microbatches."""
    defaults = {"stages": 1, "check_sums": True}
    book = AuditBook(settings, draw or other_each_time())
    bench = Bench(audits=book, **{**defaults, **options})
    bench.join_all(*(names or ("a0", "b0", "c0")))
    bench.fill()
    return bench


def orders(bench: Bench) -> list[tuple[str, Audit]]:
    """All orders to audit, with their auditors, the oldest first."""
    found = [(str(p), order) for p in bench.run.peers for order in bench.sent(p, Audit, bench.log)]
    return sorted(found, key=lambda pair: pair[1].audit)


def answer(
    bench: Bench, auditor: str, order: Audit, *, gradient: int | None = None, unlike: bool = False,
    **changes: Any,
) -> None:  # fmt: skip
    """An auditor states what it computed, `unlike` on a machine that rounds otherwise."""
    last = StageIndex(bench.manifest.stage_count - 1)
    transcript = simulated_transcript(
        order.step, order.microbatch, order.stage, last, 1 if unlike else 0
    )
    value = GRADIENTS[order.microbatch] if gradient is None else gradient
    bench.audited(auditor, order, transcript, **{**audited(value), **changes})


def answer_all(bench: Bench, *, false: str = "", since: int = 0) -> None:
    for auditor, order in orders(bench)[since:]:
        answer(bench, auditor, order, gradient=999 if auditor == false else None)


def close(bench: Bench, part: int = 13) -> None:
    """All members average and state their sums under two seeds; a0 has put `part` in."""
    members = bench.closing()
    bench.average_all()
    for _ in range(2):
        state(bench, members, part)


def state(bench: Bench, members: Iterable[PeerId], part: int = 13) -> None:
    """Answer one check of sums."""
    for peer in members:
        order = bench.sent(peer, SumCheck, bench.log)[-1]
        own = part if peer == "a0" else 0
        digests = stated(own, part)
        statement = SumStatement(
            run=RunId("run"), generation=Generation(1), step=order.step, attempt=order.attempt,
            stage=StageIndex(0), peer=peer, seed=order.seed, checks=(digests,),
        )  # fmt: skip
        event = SumsStated(
            bench.session(peer), peer, order.attempt, False, statement, f"sums of {peer}"
        )
        bench.event(event)


def lost(bench: Bench) -> list[str]:
    return [record.peer for record in bench.records(VerdictRecord)]


# ---- the draw


def test_all_cells_of_a_drawn_member_are_audited_with_one_secret() -> None:
    bench = filled()
    assert sorted(order.microbatch for _, order in orders(bench)) == [0, 1]
    (secret,) = {order.secret for _, order in orders(bench)}
    assert secret is not None
    answer_all(bench)
    assert bench.run.phase is RunPhase.CLOSING
    bench.average_all()
    seeds = {check_seed(secret, number) for number in range(CHECKS_PER_SECRET)}
    assert bench.sent("a0", SumCheck)[0].seed not in seeds, "an auditor is a member, too"
    state(bench, bench.closing())
    assert bench.sent("a0", SumCheck)[0].seed == check_seed(secret, 0)


@pytest.mark.parametrize(
    "settings",
    [AuditSettings(1.0, 0, check_sums=True), AuditSettings(2.0, 0)],
    ids=["half of the share", "no checked sums"],
)
def test_a_member_that_is_not_drawn_is_audited_without_a_secret(settings: AuditSettings) -> None:
    bench = filled(settings=settings, draw=lambda: 0.5)
    assert {order.secret for _, order in orders(bench)} == {None}


@pytest.mark.parametrize("tied", [True, False])
def test_every_member_is_audited_with_a_secret_of_its_own(tied: bool) -> None:
    bench = filled("a0", "b0", "a1", "b1", stages=2, tied=tied)
    secrets = {stage: {o.secret for _, o in orders(bench) if o.stage == stage} for stage in (0, 1)}
    assert [len(of_stage) for of_stage in secrets.values()] == [1, 1]
    assert secrets[0] != secrets[1]


# ---- at the close


def contested(*names: str, part: int = 14, false: str = "", **options: Any) -> Bench:
    """a0 states another sum than its auditors, which were the first ones asked."""
    bench = filled(*names, **options)
    answer_all(bench, false=false)
    close(bench, part)
    return bench


def test_what_contradicts_the_audits_is_audited_again_by_others_before_it_counts() -> None:
    bench = contested()
    assert bench.sent("b0", AbortRound)
    assert bench.run.phase is RunPhase.COLLECT
    bench.tick(0.25)
    first, second = orders(bench)[:2], orders(bench)[2:]
    assert {order.microbatch for _, order in second} == {0, 1}
    assert all(
        again != auditor
        for again, order in second
        for auditor, earlier in first
        if earlier.microbatch == order.microbatch
    )
    bench.tick(1.0)
    assert len(bench.sent("a0", Close, bench.log)) == 1, "the close waits"


def test_auditors_that_confirm_a_doubt_wait_longer_for_the_peers_beside_the_member() -> None:
    """The member itself may have left, or has no reason to give them anything."""
    bench = contested()
    bench.tick(0.25)
    confirming = [order for _, order in orders(bench)[2:]]
    assert all(order.sources is not None for order in confirming)
    assert {order.patience_seconds for order in confirming} == {AUDIT_SECONDS}


def test_a_member_that_added_something_is_expelled_with_the_evidence() -> None:
    bench = contested()
    bench.tick(0.25)
    answer_all(bench, since=2)
    bench.tick(0.25)
    assert lost(bench) == ["a0"]
    reason = bench.sent("a0", Refused, bench.log)[0].reason
    assert "something else into its average than the sum of what it counted" in reason
    (record,) = bench.records(VerdictRecord)
    assert record.microbatch is None
    assert record.statements[0] == "sums of a0"
    assert set(record.statements[1:]) == {"signed by b0", "signed by c0"}
    assert all(cell.peer != "a0" for _, cell in bench.step().table.items())


def test_what_another_peer_counts_of_a_contested_cell_is_audited_beside_the_contest() -> None:
    bench = contested("a0", "b0", "c0", "d0")
    bench.tick(0.25)
    bench.lose("a0")
    doubted = [(auditor, order) for auditor, order in orders(bench)[2:] if order.peer == "a0"]
    bench.report("b0", 0, 1)
    assert {order.microbatch for _, order in orders(bench) if order.peer == "b0"} == {0, 1}
    for auditor, order in doubted:
        answer(bench, auditor, order)
    bench.tick(0.25)
    for auditor, order in orders(bench)[2:]:
        if order.peer == "a0" and (auditor, order) not in doubted:
            answer(bench, auditor, order)
    bench.tick(0.25)
    assert lost(bench) == ["a0"]


def test_a_contest_goes_on_when_the_contested_cells_are_cleared() -> None:
    bench = contested()
    bench.tick(0.25)
    for microbatch in (0, 1):
        clear_cell(bench.run, bench.step(), (MicrobatchIndex(microbatch), StageIndex(0)))
    answer_all(bench, since=2)
    bench.report("b0", 0, 1)
    bench.tick(0.25)
    assert lost(bench) == ["a0"]


def test_a_contested_cell_that_is_counted_otherwise_takes_back_nothing_that_was_stated() -> None:
    """The first auditor of both cells works together with a0, the other one computes otherwise."""
    bench = joined(
        "a0", "b0", "c0", audits=AuditBook(WHOLE, lambda: 0.5), stages=1, check_sums=True
    )
    for microbatch in (0, 1):
        bench.report("a0", microbatch)
        answer(bench, *orders(bench)[-1])
    accomplice, again = (auditor for auditor, _ in orders(bench))
    assert again == accomplice
    (honest,) = {"b0", "c0"} - {accomplice}
    close(bench, 14)
    answer(bench, honest, orders(bench)[2][1], unlike=True)
    answer(bench, honest, orders(bench)[-1][1], unlike=True, distance=1e-9)
    attempt = bench.sent("a0", Close, bench.log)[-1].attempt
    bench.send("a0", RoundReport(step=1, attempt=attempt, ok=False, reason="lost", missing=(0,)))
    bench.report_broken("a0", 0, "output")
    auditor, order = orders(bench)[-1]
    assert (auditor, order.microbatch) == (accomplice, 0)
    claimed = bench.step().table[MicrobatchIndex(0), StageIndex(0)].transcript
    bench.audited(accomplice, order, claimed, sums=((to_text(5),) * CHECKS_PER_SECRET,))
    bench.tick(0.25)
    ((member, whole),) = bench.step().audits.whole.items()
    assert member == ("a0", 0)
    assert whole.contest is not None


def test_an_undecided_doubt_about_a_member_that_has_left_takes_nothing_from_its_successor() -> None:
    bench = contested()
    bench.tick(0.25)
    confirming = orders(bench)[2:]
    bench.lose("a0")
    bench.report("b0", 0, 1)
    for auditor, order in confirming:
        bench.audited(auditor, order, None)
    bench.tick(0.25)
    assert len(bench.step().table.held_by(PeerId("b0"))) == 2
    assert lost(bench) == []
    ((member, whole), *_) = bench.step().audits.whole.items()
    assert member == ("a0", 0)
    assert whole.contest is None


def test_a_member_that_leaves_while_it_is_contested_and_gives_no_tensors_withholds_them() -> None:
    bench = contested("a0", "b0", "c0", "d0", "e0")
    bench.lose("a0")
    bench.tick(0.25)
    answered = 2
    while answered < len(orders(bench)):
        bench.audited(*orders(bench)[answered], None)
        answered += 1
    assert bench.run.audits.standings.get(PeerId("a0")).withheld == 1
    assert lost(bench) == []


def first_auditor(bench: Bench) -> str:
    return orders(bench)[0][0]


def test_an_auditor_with_false_digests_is_expelled_and_the_member_is_not() -> None:
    liar = first_auditor(filled())
    bench = contested(part=13, false=liar)
    assert bench.sent("a0", AbortRound)
    bench.tick(0.25)
    answer_all(bench, since=2, false=liar)
    bench.tick(0.25)
    assert set(lost(bench)) == {liar}
    assert "a0" in bench.run.peers
    bench.tick(5.0)
    close(bench)
    assert bench.run.phase is RunPhase.APPLYING


def test_of_two_owners_neither_is_expelled_and_the_cells_are_computed_again() -> None:
    bench = contested("a0", "b0")
    bench.tick(0.25)
    assert lost(bench) == []
    assert not list(bench.step().table.held_by(PeerId("a0")))
    for peer in ("a0", "b0"):
        assert held_up.held_seconds(bench.run, bench.peer(peer), bench.now) >= 0
    assert any("no majority decides" in note.text for note in bench.log if hasattr(note, "text"))


def test_a_member_that_leaves_while_it_is_contested_is_judged_all_the_same() -> None:
    bench = contested()
    bench.lose("a0")
    bench.fill()
    bench.tick(0.25)
    answer_all(bench, since=2)
    bench.tick(0.25)
    assert lost(bench) == ["a0"]


def test_a_member_that_is_refused_for_what_it_held_up_is_judged_all_the_same() -> None:
    """Otherwise it could have itself refused for a minute whenever its sum is doubted."""
    bench = filled()
    for _ in range(2):
        held_up.record_held_up_alone(bench.run, bench.peer("a0"), bench.now)
    answer_all(bench)
    close(bench, 14)
    bench.lose("a0")
    bench.tick(0.25)
    assert held_up.refused_seconds(bench.run, PeerId("a0"), None, bench.now)
    answer_all(bench, since=2)
    bench.tick(0.25)
    assert lost(bench) == ["a0"]


def test_a_member_that_returns_as_the_device_of_other_owners_does_not_judge_itself() -> None:
    bench = contested()
    for owner in ("first", "second"):
        bench.attach("a0", owner=PeerId(owner), stage=StageIndex(0), version=Version(0))
        bench.tick(0.25)
    assert not bench.sent("a0", Audit, bench.log)
    answer_all(bench, since=2)
    bench.tick(0.25)
    assert lost(bench) == ["a0"]
    assert "a0" not in bench.run.peers


def test_an_honest_member_that_leaves_while_it_is_contested_loses_nothing() -> None:
    liar = first_auditor(filled())
    bench = contested(part=13, false=liar)
    bench.lose("a0")
    bench.tick(0.25)
    answer_all(bench, since=2, false=liar)
    bench.tick(0.25)
    assert set(lost(bench)) == {liar}


def test_a_member_that_reports_its_cells_as_lost_is_judged_all_the_same() -> None:
    bench = contested()
    attempt = bench.sent("a0", Close, bench.log)[-1].attempt
    bench.send("a0", RoundReport(step=1, attempt=attempt, ok=False, reason="lost", reset=True))
    assert not list(bench.step().table.held_by(PeerId("a0")))
    bench.tick(0.25)
    answer_all(bench, since=2)
    bench.tick(0.25)
    assert lost(bench) == ["a0"]


@pytest.mark.parametrize(
    "change",
    [
        lambda bench, auditor, order: answer(bench, auditor, order, sums=()),
        lambda bench, auditor, order: answer(bench, auditor, order, sketches=()),
        lambda bench, auditor, order: answer(
            bench, auditor, order, sums=((to_text(1),), (to_text(2),))
        ),
    ],
    ids=["no digests", "no sketches", "too many digests"],
)
def test_without_digests_of_every_cell_a_whole_audit_has_no_result(
    change: Callable[[Bench, str, Audit], None],
) -> None:
    bench = filled()
    (auditor, order), (other, second) = orders(bench)
    answer(bench, auditor, order)
    change(bench, other, second)
    close(bench, part=14)
    assert bench.run.phase is RunPhase.APPLYING


def answered_by_unlike(bench: Bench) -> None:
    """All open orders are answered by machines that round otherwise: with other digests, then with
    the distance."""
    answered = 0
    while answered < len(orders(bench)):
        auditor, order = orders(bench)[answered]
        compared = None if order.comparison is None else 1e-6
        answer(bench, auditor, order, unlike=True, distance=compared)
        answered += 1


def test_what_an_auditor_states_that_contradicts_a_cell_does_not_count() -> None:
    bench = filled("a0", "b0", "c0", "d0")
    (auditor, order), (other, second) = orders(bench)
    answer(bench, other, second)
    answer(bench, auditor, order, unlike=True)
    (compared,) = [o for a, o in orders(bench) if a == auditor and o.comparison]
    answer(bench, auditor, compared, unlike=True, distance=1.0, gradient=999)
    answered = 3
    while answered < len(orders(bench)):
        answer(bench, *orders(bench)[answered])
        answered += 1
    assert lost(bench) == [auditor]
    bench.tick(2.0)
    close(bench)
    assert bench.run.phase is RunPhase.APPLYING


def test_parts_that_were_outsized_are_compared_first() -> None:
    bench = filled("a0", "b0")
    answer_all(bench)
    (round_,) = bench.step().closing.each_round()
    whole = bench.step().audits.whole
    for number in range(2 * whole_audits.MAX_CHECKED):
        member = PeerId(f"m{number}"), StageIndex(0)
        round_.members[member[0]] = member[1]
        whole[member] = WholeAudit(bench.run.audits.draw_secret())
    for outsized in whole.values():
        outsized.ratio = 9.0
        check = RoundSums((), {})
        whole_audits.begin_checks(bench.run, bench.step(), round_, check)
        assert len(check.seeds) == 1 + whole_audits.MAX_CHECKED
        assert outsized.seed in check.seeds
        outsized.ratio = 0.0


def test_auditors_on_other_machines_prove_a_sum_within_the_tolerance() -> None:
    bench = filled()
    answered_by_unlike(bench)
    close(bench)
    assert bench.run.phase is RunPhase.APPLYING


def test_what_auditors_on_other_machines_contradict_is_audited_by_all_and_computed_again() -> None:
    """No majority can state the same digests: both sides are charged, and nothing is applied."""
    bench = filled("a0", "b0", "c0", "d0")
    answered_by_unlike(bench)
    close(bench, part=14)
    assert bench.sent("b0", AbortRound, bench.log)
    for _ in range(4):
        bench.tick(0.25)
        first = len(orders(bench))
        answered_by_unlike(bench)
        if len(orders(bench)) == first:
            break
    assert lost(bench) == []
    assert {auditor for auditor, _ in orders(bench)} == {"b0", "c0", "d0"}
    assert not list(bench.step().table.held_by(PeerId("a0")))
    assert any("no majority decides" in note.text for note in bench.log if hasattr(note, "text"))


def fail(bench: Bench) -> str:
    """The attempt fails after the member's seed is known, which is returned; the next one
    begins."""
    bench.average_all()
    state(bench, bench.closing())
    seed = bench.sent("a0", SumCheck, bench.log)[-1].seed
    bench.failed("b0", culprit="c0")
    while bench.run.phase is not RunPhase.CLOSING:
        answer_all(bench)
        bench.tick(0.25)
    return seed


@pytest.mark.parametrize("failed", [1, CHECKS_PER_SECRET, CHECKS_PER_SECRET + 1])
def test_each_attempt_has_a_seed_of_its_own_that_audits_know_in_advance(failed: int) -> None:
    """Else one liar could fail the first attempt, and another one put anything into the second."""
    book = AuditBook(WHOLE, other_each_time())
    bench = joined("a0", "b0", "c0", "d0", audits=book, stages=1, check_sums=True)
    bench.fill()
    answer_all(bench)
    seeds = []
    for _ in range(failed):
        bench.run.held_time.accounts.clear()  # none of the two is excluded
        seeds.append(fail(bench))
    asked = len(orders(bench))
    assert asked == 2 * (1 + failed // CHECKS_PER_SECRET), "a secret serves several attempts"
    close(bench, part=14)
    seeds.append(bench.sent("a0", SumCheck, bench.log)[-1].seed)
    assert len(set(seeds)) == len(seeds)
    assert bench.run.phase is RunPhase.COLLECT, "the sum is contested"


def test_a_seed_that_no_member_has_learnt_serves_the_next_attempt() -> None:
    bench = filled(draw=random.Random(1).random)
    (secret,) = {order.secret for _, order in orders(bench)}
    assert secret is not None
    answer_all(bench)
    for _ in range(CHECKS_PER_SECRET + 1):
        bench.run.held_time.accounts.clear()
        bench.average_all()
        bench.failed("b0", culprit="c0")
        while bench.run.phase is not RunPhase.CLOSING:
            bench.tick(0.25)
    close(bench, part=14)
    assert bench.sent("a0", SumCheck, bench.log)[-1].seed == check_seed(secret, 0)
    assert bench.run.phase is RunPhase.COLLECT, "the sum is contested"


def test_after_a_failed_attempt_an_honest_member_closes_the_step() -> None:
    bench = filled()
    answer_all(bench)
    fail(bench)
    close(bench)
    assert bench.run.phase is RunPhase.APPLYING
    assert lost(bench) == []


def known(bench: Bench, failed: int) -> Bench:
    """So many attempts have failed after the member's seed was known, the last one by itself: it
    has lost the cells that it had counted."""
    answer_all(bench)
    for _ in range(failed - 1):
        bench.run.held_time.accounts.clear()  # none is excluded
        fail(bench)
    bench.run.held_time.accounts.clear()
    bench.average_all()
    state(bench, bench.closing())
    bench.failed("a0", missing=(0, 1))
    return bench


def test_cells_that_are_audited_without_the_new_secret_are_audited_anew_and_hidden() -> None:
    bench = known(filled("a0", "b0", "c0", "d0"), CHECKS_PER_SECRET)
    before = len(orders(bench))
    bench.report("a0", 0)
    assert [order.secret for _, order in orders(bench)[before:]] == [None]
    bench.report("a0", 1)
    latest = {order.microbatch: order for _, order in orders(bench)[before:]}
    assert len({order.secret for order in latest.values()} - {None}) == 1
    assert all(order.secret and order.sources for order in latest.values())


def test_a_doubt_about_a_cell_outlasts_the_secret_of_a_whole_audit() -> None:
    bench = known(filled("a0", "b0", "c0", "d0"), CHECKS_PER_SECRET)
    before = len(orders(bench))
    bench.report("a0", 0)
    for distance in (None, 1.0):
        auditor, order = orders(bench)[-1]
        other = bench.receipt("a0", 0).transcript.model_copy(update={"gradient": OTHER_DIGEST})
        bench.audited(auditor, order, other, distance=distance)
    doubted = len(orders(bench))
    assert [order.microbatch for _, order in orders(bench)[before:]] == [0, 0, 0]
    bench.report("a0", 1)
    assert {order.microbatch for _, order in orders(bench)[doubted:]} == {1}


def test_a_cell_that_is_audited_with_the_secret_already_is_asked_for_no_second_time() -> None:
    bench = known(filled(), 1)
    bench.report("a0", 1)
    before = len(orders(bench))
    bench.report_broken("a0", 0, "output")
    (again,) = [order for _, order in orders(bench)[before:]]
    assert (again.microbatch, again.secret) == (0, orders(bench)[0][1].secret)


def test_the_close_waits_for_the_audits_of_one_member_if_another_one_has_no_auditor() -> None:
    bench = joined(
        "a0", "b0", "c0", "a1", audits=AuditBook(WHOLE, other_each_time()), check_sums=True
    )
    bench.report("a0", 0)
    bench.report("a1", 0)
    assert list(bench.step().audits.whole) == [("a0", 0), ("a1", 1)]
    for whole in bench.step().audits.whole.values():
        whole.attempt, whole.check = 1, CHECKS_PER_SECRET - 1  # all of their seeds are known
    assert whole_audits.renew(bench.run, bench.step(), bench.now)


# ---- whole swarms


def audited_world(lie: SumLie, seed: int, stages: int = 1, **changes: Any) -> World:
    values: dict[str, Any] = {
        "stages": stages, "peers": 4 * stages, "microbatches": 4, "steps": 4, "starting": 3,
        "check_sums": True, "audit_share": 2.0, "alike": True, "sum_lies": (lie,),
        "tied": bool(seed % 2), "staleness": seed // 2 % 2,
    }  # fmt: skip
    return run_to_the_end(Options(**{**values, **changes}), seed)


def lies_of(world: World) -> set[str]:
    return {record.peer for record in world.store.records if isinstance(record, VerdictRecord)}


@pytest.mark.parametrize("stages", [1, 2])
def test_a_member_that_adds_to_its_sum_changes_no_step_and_is_found(stages: int) -> None:
    """The world compares each applied sum with the cells that it must have."""
    found = [lies_of(audited_world(SumLie.ADDS, seed, stages)) for seed in range(4)]
    assert set().union(*found) == {"peer0"}


@pytest.mark.parametrize("stages", [1, 2])
def test_false_digests_in_audits_expel_their_auditor_and_no_honest_peer(stages: int) -> None:
    for seed in range(4):
        assert lies_of(audited_world(SumLie.FALSE_AUDITS, seed, stages)) == {"peer0"}


def test_honest_swarms_that_are_audited_whole_lose_nothing() -> None:
    for seed in range(4):
        world = audited_world(SumLie.NONE, seed, 2)
        assert lies_of(world) == set()
        assert world.counts["abort"] == 0


def test_a_member_cannot_add_to_its_sum_behind_an_attempt_that_another_liar_has_failed() -> None:
    lies = (SumLie.ADDS, SumLie.EQUIVOCATES)
    aborts = 0
    for seed in range(6):
        world = audited_world(SumLie.NONE, seed, peers=6, starting=5, sum_lies=lies)
        assert lies_of(world) <= {"peer0", "peer1"}
        aborts += world.counts["abort"]
    assert aborts > 0


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_member_that_watches_its_auditors_does_not_see_a_whole_audit(stages: int) -> None:
    """The inputs come from the peers beside it; it sees what it sees without whole audits."""
    added = 0
    for seed in range(4):
        world = audited_world(SumLie.WATCHES, seed, stages, hidden_only=True)
        assert lies_of(world) <= {"peer0"}
        assert world.counts["hidden audits"] > 0
        if world.counts["added"]:
            added += 1
            assert lies_of(world) == {"peer0"}
    assert added > 0


def test_a_member_that_leaves_when_its_sum_is_doubted_is_judged_in_its_absence() -> None:
    found = set[str]()
    for seed in range(4):
        world = audited_world(SumLie.LEAVES, seed, hidden_only=bool(seed % 2))
        found |= lies_of(world)
        assert world.counts["added"] > 0
    assert found == {"peer0"}


def test_an_auditor_that_knows_the_seed_of_a_member_cannot_hand_out_another_sum() -> None:
    forged = 0
    for seed in range(8):
        world = audited_world(SumLie.FORGES, seed, audit_share=0.5)
        assert lies_of(world) <= {"peer0"}
        forged += world.counts["forged sums"]
    assert forged > 0


def test_unlike_machines_make_no_liar() -> None:
    for seed in range(4):
        assert lies_of(audited_world(SumLie.NONE, seed, 2, alike=False)) == set()


def test_without_whole_audits_an_addition_is_applied_and_the_world_notices() -> None:
    with pytest.raises(Violation, match="sums up"):
        audited_world(SumLie.ADDS, 0, audit_share=0.0)
