"""Whole audits: which digests of contested cells are true, from what owners state of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kits.transcripts import TRANSCRIPT
from swarm_coordinator.core.trust.whole_audits import (
    CellSums,
    Sums,
    WholeAudit,
    decided,
    sums_of,
    total,
)
from swarm_shared.base.types import MicrobatchIndex, PeerId
from swarm_shared.identity.linear_digest import CHECKS_PER_SECRET, MODULUS

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
    ones = tuple(f"{number:016x}" for number in range(CHECKS_PER_SECRET))
    tens = tuple(f"{10 + number:016x}" for number in range(CHECKS_PER_SECRET))
    assert sums_of((tens,), 1) == tuple((10 + n,) for n in range(CHECKS_PER_SECRET))
    assert sums_of((ones, tens), 2) == tuple((n, 10 + n) for n in range(CHECKS_PER_SECRET))
    assert sums_of((ones,), 2) == ()
    assert sums_of((ones[1:],), 1) == ()
    assert sums_of((), 1) == ()


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
