"""Outsized parts: a member that puts in much more than others is audited before the step closes."""

from __future__ import annotations

import string
from collections.abc import Callable

import pytest

from kits import scalar_sums
from kits.swarm_world.event_bench import Bench
from kits.swarm_world.facts import Options
from kits.swarm_world.sums import SumLie
from kits.swarm_world.sweep import run_to_the_end
from kits.swarm_world.world import World
from swarm_coordinator.core.events import Note, SumsStated, VerdictRecord
from swarm_coordinator.core.rules.closing.whole_audits import ENOUGH_AUDITORS, MAX_CHECKED
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.trust.audits import AuditBook, AuditSettings
from swarm_coordinator.core.trust.part_norms import KNOWN_SHARE, MAX_RATIO
from swarm_coordinator.simulator.transcripts import simulated_transcript
from swarm_shared.base.types import CHECKS_PER_SECRET, Generation, PeerId, RunId, StageIndex
from swarm_shared.identity.linear_digest import check_seed
from swarm_shared.identity.work_statements import SumStatement
from swarm_shared.protocol import AbortRound, Audit, Close, SumCheck

UNAUDITED = AuditSettings(audit_share=0.0, probation_cells=0, check_sums=True)
"""No cell is drawn."""

HONEST = 10
"""The gradient of a microbatch, a vector of one number."""

LARGE = 1000


MEMBERS = ("a0", "b0", "c0", "d0")


def counted(*names: str, more_of_a: int = 0) -> Bench:
    """A run of one stage in which each member has counted one microbatch, and the first one some
    more."""
    draws = (number / 100_000 for number in range(1, 100_000))
    members = names or MEMBERS
    bench = Bench(
        audits=AuditBook(UNAUDITED, lambda: next(draws)), stages=1, check_sums=True,
        microbatches=len(members) + more_of_a,
    )  # fmt: skip
    bench.join_all(*members)
    for microbatch, peer in enumerate(members + ("a0",) * more_of_a):
        bench.report(peer, microbatch)
    return bench


def close(bench: Bench, of_a: int = LARGE, checks: int = 2, **of_others: int) -> None:
    """All members average, and state what they have put in."""
    bench.average_all()
    for _ in range(checks):
        state(bench, of_a, **of_others)


def state(bench: Bench, of_a: int = LARGE, **of_others: int) -> None:
    """Answer one check of sums."""
    members = bench.closing()
    parts = {peer: of_others.get(peer, HONEST) for peer in members} | {PeerId("a0"): of_a}
    for peer in members:
        order = bench.sent(peer, SumCheck, bench.log)[-1]
        statement = SumStatement(
            run=RunId("run"), generation=Generation(1), step=order.step, attempt=order.attempt,
            stage=StageIndex(0), peer=peer, seed=order.seed,
            checks=(scalar_sums.stated(parts[peer], sum(parts.values())),),
        )  # fmt: skip
        envelope = f"sums of {peer} in attempt {order.attempt}"
        bench.event(
            SumsStated(bench.session(peer), peer, order.attempt, False, statement, envelope)
        )


def orders(bench: Bench) -> list[tuple[str, Audit]]:
    return [(str(p), order) for p in bench.run.peers for order in bench.sent(p, Audit, bench.log)]


def audit(bench: Bench, gradient: int, unlike: bool = False, **of_others: int) -> None:
    """Auditors state this gradient, or others, until none is asked any more; `unlike` on machines
    that round otherwise."""
    answered: set[int] = set()
    while new := [pair for pair in orders(bench) if pair[1].audit not in answered]:
        for auditor, order in new:
            answered.add(order.audit)
            transcript = simulated_transcript(
                order.step, order.microbatch, order.stage, order.stage, int(unlike)
            )
            values = scalar_sums.audited(of_others.get(auditor, gradient))
            distance = 1e-6 if order.comparison else None
            bench.audited(auditor, order, transcript, **values, distance=distance)
        bench.tick(0.25)


def lost(bench: Bench) -> list[str]:
    return [record.peer for record in bench.records(VerdictRecord)]


def notes(bench: Bench) -> str:
    return "\n".join(command.text for command in bench.log if isinstance(command, Note))


def test_parts_of_like_size_close_the_step() -> None:
    bench = counted()
    close(bench, of_a=int(MAX_RATIO * HONEST))
    assert bench.run.phase is RunPhase.APPLYING
    assert orders(bench) == []


def test_an_outsized_part_ends_the_attempt_and_what_it_sums_is_audited() -> None:
    bench = counted()
    close(bench, checks=1)
    (aborted,) = bench.sent("b0", AbortRound)
    assert "put much more into its average than the others of its stage" in aborted.reason
    assert bench.run.phase is RunPhase.COLLECT
    bench.tick(0.25)
    ((auditor, order),) = orders(bench)
    assert (order.peer, order.microbatch, auditor != "a0") == ("a0", 0, True)
    assert order.secret is not None
    seed = bench.sent("b0", SumCheck, bench.log)[-1].seed
    assert seed == check_seed(order.secret, 0), "what was stated is compared"
    bench.tick(1.0)
    assert len(bench.sent("b0", Close, bench.log)) == 1, "the close waits"


@pytest.mark.parametrize("unlike", [False, True])
def test_an_honest_member_with_a_large_gradient_is_proved_by_two_auditors_of_each_cell(
    unlike: bool,
) -> None:
    bench = counted(*(f"{letter}0" for letter in string.ascii_lowercase[:9]))
    close(bench, checks=1)
    bench.tick(0.25)
    audit(bench, LARGE, unlike)
    assert bench.run.phase is RunPhase.CLOSING
    close(bench)
    assert bench.run.phase is RunPhase.APPLYING
    assert len({auditor for auditor, _ in orders(bench)}) == ENOUGH_AUDITORS
    (secret,) = {order.secret for _, order in orders(bench)}
    assert secret is not None
    seeds = {check_seed(secret, number) for number in range(1, CHECKS_PER_SECRET)}
    assert bench.sent("b0", SumCheck, bench.log)[-1].seed in seeds, "the part is compared again"
    assert lost(bench) == []


@pytest.mark.parametrize("unlike", [False, True])
def test_an_auditor_that_works_together_with_the_member_proves_nothing(unlike: bool) -> None:
    """Most owners decide; where they compute otherwise they cannot, and the cell is cleared."""
    bench = counted("a0", "b0", "c0", "d0", "e0")
    close(bench, checks=1)
    bench.tick(0.25)
    ((accomplice, _),) = orders(bench)
    audit(bench, HONEST, unlike, **{accomplice: LARGE})
    assert set(lost(bench)) == (set() if unlike else {"a0", accomplice})
    assert not list(bench.step().table.held_by(PeerId("a0")))
    assert bench.run.phase is RunPhase.COLLECT


def test_each_cell_gets_as_many_auditors_as_are_enough_however_they_answer() -> None:
    """One after another, and first all that are asked about one cell."""
    bench = counted(*(f"{letter}0" for letter in string.ascii_lowercase[:9]), more_of_a=1)
    close(bench, of_a=2 * LARGE, checks=1)
    answered = 0
    while bench.run.phase is RunPhase.COLLECT:
        bench.tick(0.25)
        by_cell = sorted(orders(bench), key=lambda pair: (pair[1].microbatch, pair[1].audit))
        for auditor, order in by_cell:
            transcript = simulated_transcript(order.step, order.microbatch, order.stage, 0)
            if bench.audited(auditor, order, transcript, **scalar_sums.audited(LARGE)):
                answered += 1
                break
        assert answered < 99
    assert len(orders(bench)) == 2 * ENOUGH_AUDITORS


def test_where_the_others_do_not_answer_one_auditor_is_enough() -> None:
    bench = counted()
    close(bench, checks=1)
    bench.tick(0.25)
    ((auditor, order),) = orders(bench)
    transcript = simulated_transcript(order.step, order.microbatch, order.stage, order.stage)
    bench.audited(auditor, order, transcript, **scalar_sums.audited(LARGE))
    bench.tick(60.0)
    assert len(orders(bench)) > 1
    assert bench.run.phase is RunPhase.CLOSING
    close(bench)
    assert bench.run.phase is RunPhase.APPLYING
    assert len(list(bench.step().table.held_by(PeerId("a0")))) == 1


@pytest.mark.parametrize("count", [2, 3, 4])
def test_what_was_proved_is_known_for_the_next_time(count: int) -> None:
    bench = counted(*MEMBERS[:count])
    close(bench, checks=1)
    bench.tick(0.25)
    audit(bench, LARGE)
    assert bench.run.audits.proved_ratios == {0: LARGE / HONEST}


def test_a_known_part_is_drawn_once_in_an_attempt() -> None:
    bench = counted()
    bench.run.audits.proved_ratios[StageIndex(0)] = LARGE / HONEST
    bench.run.audits.draw = lambda: 0.99
    close(bench, checks=1)
    bench.run.audits.draw = lambda: 0.0
    state(bench)
    assert bench.run.phase is RunPhase.APPLYING


@pytest.mark.parametrize(("drawn", "audited"), [(KNOWN_SHARE, False), (0.99 * KNOWN_SHARE, True)])
def test_of_parts_as_large_as_one_that_was_proved_a_share_is_audited(
    drawn: float, audited: bool
) -> None:
    other = counted()
    other.run.audits.proved_ratios[StageIndex(0)] = LARGE / HONEST
    other.run.audits.draw = lambda: drawn
    close(other, checks=1)
    assert bool(other.sent("b0", AbortRound)) == audited
    other = counted()
    other.run.audits.proved_ratios[StageIndex(0)] = LARGE / HONEST
    other.run.audits.draw = lambda: 0.99
    close(other, of_a=LARGE + 1, checks=1)
    assert other.sent("b0", AbortRound), "it is larger"


def test_a_member_that_was_proved_cannot_put_in_something_else_in_the_next_attempt() -> None:
    bench = counted()
    close(bench, checks=1)
    bench.tick(0.25)
    audit(bench, LARGE)
    close(bench, of_a=2 * LARGE)
    assert bench.run.phase is RunPhase.COLLECT
    assert "something else into its average" in bench.sent("b0", AbortRound, bench.log)[-1].reason


def test_a_member_that_added_something_is_expelled_by_most_owners() -> None:
    bench = counted()
    close(bench, checks=1)
    bench.tick(0.25)
    audit(bench, HONEST)
    assert lost(bench) == ["a0"]
    (record,) = bench.records(VerdictRecord)
    assert "something else into its average than the sum of what it counted" in record.reason
    assert record.statements[0].startswith("sums of a0 in attempt")
    assert all(cell.peer != "a0" for _, cell in bench.step().table.items())


def leaves(bench: Bench) -> None:
    bench.lose("a0")


def lets_wait(bench: Bench) -> None:
    bench.tick(60.0)


@pytest.mark.parametrize("change", [leaves, lets_wait])
def test_a_step_without_auditors_goes_on(change: Callable[[Bench], None]) -> None:
    """Honest members may have large gradients: they are not cleared again and again."""
    bench = counted()
    close(bench, checks=1)
    bench.tick(0.25)
    change(bench)
    bench.tick(60.0)
    if change is lets_wait:
        assert "is not proved" in notes(bench)
        assert bench.run.phase is RunPhase.CLOSING
        close(bench)
        assert bench.run.phase is RunPhase.APPLYING, "it is not audited again"
    else:
        assert {m for m, _ in bench.step().table.held_by(PeerId("a0"))} == set()


def test_as_many_members_are_contested_at_once_as_one_attempt_compares() -> None:
    names = [f"{letter}0" for letter in string.ascii_lowercase[:19]]
    bench = counted(*names)
    close(bench, checks=1, **{name: LARGE + 1 + n for n, name in enumerate(names[1:9])})
    bench.tick(0.25)
    assert MAX_CHECKED == 8
    assert {order.peer for _, order in orders(bench)} == set(names[1:9]), "the largest ones"


def test_one_other_member_is_enough_to_compare_with_and_one_owner_is_not() -> None:
    bench = counted("a0", "b0")
    close(bench, checks=1)
    assert bench.sent("b0", AbortRound)
    alone = counted("a0")
    close(alone, checks=0)
    assert alone.run.phase is RunPhase.APPLYING


# ---- whole swarms


def world_of(lie: SumLie, seed: int, stages: int = 1) -> World:
    """No cell is drawn: only what is put in is seen."""
    options = Options(
        stages=stages, peers=4 * stages, microbatches=8, steps=4, starting=3, check_sums=True,
        sum_lies=(lie,), tied=bool(seed % 2), staleness=seed // 2 % 2,
    )  # fmt: skip
    return run_to_the_end(options, seed)


def lies_of(world: World) -> set[str]:
    return {record.peer for record in world.store.records if isinstance(record, VerdictRecord)}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("lie", [SumLie.OUTSIZED, SumLie.OUTSIZED_LEAVES], ids=lambda lie: lie.name)
def test_no_outsized_part_is_applied_and_its_member_is_found(lie: SumLie, stages: int) -> None:
    """The world compares each applied sum with the cells that it must have."""
    found = set[str]()
    for seed in range(4):
        world = world_of(lie, seed, stages)
        assert world.counts["added"] > 0
        found |= lies_of(world)
    assert found == {"peer0"}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("alike", [True, False])
def test_honest_members_with_large_gradients_are_audited_and_lose_nothing(
    stages: int, alike: bool
) -> None:
    for seed in range(4):
        options = Options(
            stages=stages, peers=4 * stages, microbatches=8, steps=4, starting=3, check_sums=True,
            large_gradients=1, audit_share=0.01, alike=alike, tied=bool(seed % 2),
            staleness=seed // 2 % 2,
        )  # fmt: skip
        world = run_to_the_end(options, seed)
        assert lies_of(world) == set()
        assert world.counts["hidden audits"] > 0
        assert world.store.version == 4


@pytest.mark.parametrize("stages", [1, 2])
def test_a_false_sketch_hides_no_outsized_part(stages: int) -> None:
    for seed in range(4):
        world = world_of(SumLie.HIDES_SIZE, seed, stages)
        assert world.counts["added"] > 0
        assert lies_of(world) <= {"peer0"}
