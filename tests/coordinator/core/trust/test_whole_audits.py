"""Whole audits: which digests of contested cells are true, from what owners state of them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kits import scalar_sums
from kits.scalar_sums import sketch_of
from kits.transcripts import TRANSCRIPT
from swarm_coordinator.core.trust.whole_audits import (
    CellSums,
    Sums,
    WholeAudit,
    are_alike,
    cell_sums,
    decided,
    is_sum,
    total,
)
from swarm_shared.base.types import (
    CHECKS_PER_SECRET,
    Generation,
    MicrobatchIndex,
    PeerId,
    RunId,
    StageIndex,
    Step,
)
from swarm_shared.identity.linear_digest import MODULUS
from swarm_shared.identity.work_statements import AuditStatement, SumStatement

TRUTH: dict[int, Sums] = {0: (5,), 1: (MODULUS - 3,), 2: (70,)}
WHOLE = total(TRUTH.values())
NO_OWNERS: frozenset[PeerId] = frozenset()


def stated(
    values: dict[str, dict[int, Sums]],
) -> dict[MicrobatchIndex, dict[PeerId, CellSums]]:
    """By cell and owner, from what each owner states of each cell."""
    return {
        MicrobatchIndex(m): {
            PeerId(owner): CellSums(of[m], PeerId(owner), f"by {owner}")
            for owner, of in values.items()
            if m in of
        }
        for m in TRUTH
    }


def decide(
    values: dict[str, dict[int, Sums]], put_in: Sums = WHOLE, needed: int = 2,
    trusted: frozenset[PeerId] = NO_OWNERS,
) -> dict[int, Sums] | None:  # fmt: skip
    found = decided(stated(values), put_in, needed, trusted)
    return None if found is None else {int(m): sums for m, sums in found.items()}


def lie(by: int = 1, *cells: int) -> dict[int, Sums]:
    return {m: (s[0] + by,) if m in (cells or (0,)) else s for m, s in TRUTH.items()}


def test_digests_add_up_modulo_two_to_the_sixty_fourth_for_each_part() -> None:
    assert total([(1, MODULUS - 1), (2, 5)]) == (3, 4)


def test_a_statement_has_a_digest_for_each_part_and_check() -> None:
    checks = range(CHECKS_PER_SECRET)
    ones, tens = (tuple(f"{first + n:016x}" for n in checks) for first in (0, 10))
    few, many = (tuple(sketch_of(first + n) for n in checks) for first in (0, 10))

    def sums_of(sums: tuple[Any, ...], sketches: tuple[Any, ...], parts: int) -> list[Any]:
        statement = audit_statement(sums=sums, sketches=sketches)
        found = cell_sums(statement, "by a", parts, exact=True)
        assert {(cell.auditor, cell.envelope) for cell in found} <= {("a", "by a")}
        return [(cell.sums, cell.sketches) for cell in found]

    assert sums_of((tens,), (many,), 1) == [((10 + n,), (sketch_of(10 + n),)) for n in checks]
    assert sums_of((ones, tens), (few, many), 2) == [
        ((n, 10 + n), (sketch_of(n), sketch_of(10 + n))) for n in checks
    ]
    for sums, sketches, parts in [
        ((ones,), (few,), 2), ((ones[1:],), (few,), 1), ((ones,), (few[1:],), 1), ((), (), 1),
        ((ones,), (), 1), ((), (few,), 1), ((ones, tens), (few, many), 1),
    ]:  # fmt: skip
        assert sums_of(sums, sketches, parts) == []


def audit_statement(**changes: Any) -> AuditStatement:
    values: dict[str, Any] = {
        "run": RunId("run"), "generation": Generation(1), "audit": 1, "step": Step(1),
        "microbatch": MicrobatchIndex(0), "stage": StageIndex(0), "peer": PeerId("m"),
        "auditor": PeerId("a"), "transcript": TRANSCRIPT,
    }  # fmt: skip
    return AuditStatement(**{**values, **changes})


# ---- the sum of what auditors computed


def sum_statement(*parts: int, sketched: int | None = None) -> SumStatement:
    return SumStatement(
        run=RunId("run"), generation=Generation(1), step=Step(1), attempt=1, stage=StageIndex(0),
        peer=PeerId("m"), seed="5eed" * 8,
        checks=tuple(scalar_sums.stated(part, part, sketched) for part in parts),
    )  # fmt: skip


def computed(*values: int, exact: bool = True) -> list[CellSums]:
    """What auditors state of cells whose gradients have a single part."""
    return [
        CellSums((value % MODULUS,), PeerId("a"), "by a", (sketch_of(value),), exact)
        for value in values
    ]


def test_auditors_that_compute_like_the_member_find_every_difference() -> None:
    cells = computed(10**6, 2 * 10**6)
    assert is_sum(cells, sum_statement(3 * 10**6), 1e-4)
    assert not is_sum(cells, sum_statement(3 * 10**6 + 1), 1e-4)


def test_auditors_on_other_machines_find_what_is_beyond_the_tolerance() -> None:
    """Each cell may differ by a ten-thousandth of its norm, and sketches are off by some 10 %."""
    cells = [*computed(10**6), *computed(-2 * 10**6, exact=False)]
    assert is_sum(cells, sum_statement(-(10**6) + 299), 1e-4)
    assert is_sum(cells, sum_statement(-(10**6) - 299), 1e-4)
    assert not is_sum(cells, sum_statement(-(10**6) + 10**3), 1e-4)
    assert not is_sum(cells, sum_statement(-(10**6) - 10**3), 1e-4)


def test_auditors_that_compute_alike_state_the_same_of_a_cell() -> None:
    assert are_alike(computed(10**6), 1e-4)
    assert are_alike(computed(10**6, 10**6), 1e-4)
    assert not are_alike(computed(10**6, 10**6 + 1), 1e-4)


def test_unlike_auditors_may_differ_by_twice_the_tolerance() -> None:
    """Each of them may differ by it from the member."""
    for other in (10**6 - 399, 10**6 + 399):
        assert are_alike([*computed(10**6), *computed(other, exact=False)], 1e-4)
    for other in (10**6 - 500, 10**6 + 500):
        assert not are_alike([*computed(10**6), *computed(other, exact=False)], 1e-4)
        assert not are_alike(computed(10**6, 10**6, other, exact=False), 1e-4)


def test_every_part_of_a_gradient_is_compared() -> None:
    cells = [
        CellSums((5, 7), PeerId("a"), "by a", (sketch_of(5), sketch_of(7)), exact)
        for exact in (True, False)
    ]
    for exact in (cells[:1], cells[1:]):
        assert is_sum(exact, sum_statement(5, 7), 1e-4)
        assert not is_sum(exact, sum_statement(5, 8), 1e-4)
        assert not is_sum(exact, sum_statement(6, 7), 1e-4)


def test_one_auditor_against_the_member_decides_nothing() -> None:
    assert decide({"a": TRUTH}, put_in=(0,)) is None
    assert decide({"a": lie()}) is None


def test_two_of_three_owners_convict_a_member_that_put_in_something_else() -> None:
    assert decide({"a": TRUTH, "b": TRUTH}, put_in=(0,)) == TRUTH


def test_another_auditor_and_the_member_outvote_a_false_one() -> None:
    assert decide({"a": lie(), "b": TRUTH}) == TRUTH
    assert decide({"b": TRUTH, "z": lie(1, 0, 1)}) == TRUTH


def test_auditors_of_different_cells_are_judged_together() -> None:
    first = {"a": {0: TRUTH[0], 1: TRUTH[1]}, "b": {2: lie(1, 2)[2]}}
    assert decide(first) is None
    assert decide({"a": TRUTH, "b": {0: TRUTH[0], 1: TRUTH[1], 2: lie(1, 2)[2]}}) == TRUTH


def test_a_trusted_owner_decides_alone() -> None:
    trusted = frozenset({PeerId("t")})
    assert decide({"t": TRUTH}, put_in=(0,), trusted=trusted) == TRUTH
    assert decide({"a": lie(), "b": lie(), "t": TRUTH}, trusted=trusted) == TRUTH


@given(
    owners=st.integers(2, 8),
    liars=st.sets(st.integers(0, 7)),
    lies=st.lists(st.dictionaries(st.sampled_from([0, 1, 2]), st.integers(1, 3)), min_size=8),
    member_lies=st.booleans(),
    asked=st.sets(st.integers(0, 7)),
)
def test_as_long_as_most_owners_are_honest_only_true_digests_are_found(
    owners: int, liars: set[int], lies: list[dict[int, int]], member_lies: bool, asked: set[int]
) -> None:
    """`owners` besides the member; liars are a minority of all, and may help a lying member."""
    most_liars = owners // 2 - member_lies if (owners + 1) % 2 else (owners - 1) // 2 - member_lies
    lying = {n for n in sorted(liars)[: max(0, most_liars)] if n < owners}
    change = {0: 1, 1: 0, 2: 0}
    put_in = total([WHOLE, (sum(change.values()),)]) if member_lies else WHOLE
    values: dict[str, dict[int, Sums]] = {}
    for n in range(owners):
        if n in asked or not asked:
            by = lies[n] if n in lying else {}
            values[f"o{n}"] = {m: ((s[0] + by.get(m, 0)) % MODULUS,) for m, s in TRUTH.items()}
    needed = (owners + 1) // 2 + 1
    found = decide(values, put_in, needed)
    assert found in (None, TRUTH)
    if len(values) == owners:
        assert found == TRUTH


def test_what_is_stated_of_a_receipt_counts_for_it_alone_and_is_kept_beside_that_of_others() -> (
    None
):
    whole = WholeAudit("5eed" * 8)
    cell, owner = MicrobatchIndex(0), PeerId("a")
    other = TRANSCRIPT.model_copy(update={"gradient": "f" * 32})
    for number, transcript in enumerate((TRANSCRIPT, other)):
        stated = CellSums((number,), owner, "by a")
        whole.add(cell, transcript, owner, (stated,) * CHECKS_PER_SECRET)
    for number, transcript in enumerate((TRANSCRIPT, other)):
        assert whole.of_receipt(cell, transcript)[owner].sums == (number,)
