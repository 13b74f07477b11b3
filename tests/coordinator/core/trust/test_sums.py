"""Checks of sums: which statements agree, and what the digests of slices show."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kits.scalar_sums import stated
from swarm_coordinator.core.trust import sums
from swarm_coordinator.core.trust.sums import RoundSums, SignedSums, SumGroup
from swarm_shared.base.types import Generation, PeerId, RunId, StageIndex, Step
from swarm_shared.identity import norm_sketch
from swarm_shared.identity.linear_digest import DigestKey, to_text
from swarm_shared.identity.work_statements import SumDigests, SumStatement

SEED, WEIGHTS = "5eed" * 8, "0f" * 16
STAGE = StageIndex(0)
SLICE = 3
"""Elements of a slice."""

Vector = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass
class AllReduce:
    """An all-reduce of whole numbers whose members may lie about any of it."""

    members: tuple[PeerId, ...]
    parts: dict[PeerId, Vector]
    idle: frozenset[PeerId] = frozenset()
    stated: dict[PeerId, Vector] = field(default_factory=dict)
    """What a member states that it put in, where that is something else."""
    sketched: dict[PeerId, Vector] = field(default_factory=dict)
    """What a member states the sketch of, where that is something else."""
    sent: dict[tuple[PeerId, PeerId], Vector] = field(default_factory=dict)
    """What is added to the sum that one member sends to another, itself included."""
    claims: dict[tuple[PeerId, PeerId], int] = field(default_factory=dict)
    """What a reducer adds to the digest of what it received from a member."""

    @classmethod
    def of(cls, size: int, seed: int = 0, idle: int = 0) -> AllReduce:
        rng = np.random.default_rng(seed)
        names = tuple(PeerId(f"m{place}") for place in range(size))
        quiet = names[size - idle :]
        parts = {name: rng.integers(-99, 99, SLICE * size) * (name not in quiet) for name in names}
        return cls(names, parts, frozenset(quiet))

    def bounds(self, reducer: PeerId) -> slice:
        start = SLICE * self.members.index(reducer)
        return slice(start, start + SLICE)

    def changes(self, reducer: PeerId, receiver: PeerId) -> None:
        self.sent[reducer, receiver] = np.array([1] + [0] * (SLICE - 1))

    def result(self, member: PeerId) -> Vector:
        total: Vector = sum(self.parts.values(), np.zeros(SLICE * len(self.members), np.int64))
        for (reducer, receiver), change in self.sent.items():
            if receiver == member:
                total[self.bounds(reducer)] += change
        return total

    def totals(self, member: PeerId) -> SumDigests:
        part, result = self.stated.get(member, self.parts[member]), self.result(member)
        vectors = (part, result, self.sketched.get(member, part))
        _, result_sketch, part_sketch = map(
            norm_sketch.to_text, norm_sketch.Sketcher(SEED, "own").sketches(vectors)
        )
        of_part, of_result = map(to_text, DigestKey(SEED, "own").digests((part, result)))
        return SumDigests(
            part=of_part, result=of_result, part_sketch=part_sketch, result_sketch=result_sketch
        )

    def digests(self, member: PeerId, weights: str = "") -> SumDigests:
        key = norm_sketch.vector_key(SEED, "own", weights or None)
        part, result = self.stated.get(member, self.parts[member]), self.result(member)
        if weights:
            part = self.sketched.get(member, part)

        def of(vector: Vector, reducer: PeerId, more: int = 0) -> str:
            bounds = self.bounds(reducer)
            return to_text((key.digests((vector[bounds],), bounds.start)[0] + more) % 2**64)

        whole_part, whole_result = map(to_text, key.digests((part, result)))
        return SumDigests(
            part=whole_part,
            result=whole_result,
            parts=tuple(of(part, reducer) for reducer in self.members),
            results=tuple(of(result, reducer) for reducer in self.members),
            received=tuple(
                of(self.parts[other], member, self.claims.get((member, other), 0))
                for other in self.members
            ),
        )

    def check(self, weights: str = "") -> RoundSums:
        """The check of it, with all statements in."""
        check = RoundSums((SumGroup("the average", self.members),), {STAGE: (0,)})
        for member in self.members:
            check.add_member(member, STAGE, None, contributes=member not in self.idle)
        for member in self.members:
            of_all, of_slices = self.totals(member), self.digests(member, weights)
            check.totals[member] = SignedSums(statement(member, of_all), f"by {member}")
            check.slices[member] = SignedSums(statement(member, of_slices), f"by {member}")
        check.details, check.weights = True, weights
        return check

    def findings(
        self, owners: dict[PeerId, PeerId] | None = None, weights: str = ""
    ) -> sums.Findings:
        return sums.findings(self.check(weights), owners or {}, all_others)


def all_others(owners: Collection[PeerId], judged: PeerId) -> set[PeerId]:
    return set(owners) - {judged}


def statement(member: PeerId, *checks: SumDigests) -> SumStatement:
    return SumStatement(
        run=RunId("0" * 64), generation=Generation(1), step=Step(1), attempt=1, stage=STAGE,
        peer=member, seed=SEED, checks=checks,
    )  # fmt: skip


# ---- the totals


@given(size=st.integers(2, 6), seed=st.integers(0, 2**32), idle=st.integers(0, 2))
def test_honest_members_agree_and_nothing_is_found(size: int, seed: int, idle: int) -> None:
    reduced = AllReduce.of(size, seed, idle)
    check = reduced.check()
    assert sums.agree(check)
    assert all(sums.lie_in(check, m, check.slices[m].statement) is None for m in reduced.members)
    assert reduced.findings() == sums.Findings({}, frozenset())


def changes_sum(reduced: AllReduce, liar: PeerId) -> None:
    for member in reduced.members:
        reduced.changes(liar, member)


def changes_sum_and_received(reduced: AllReduce, liar: PeerId) -> None:
    changes_sum(reduced, liar)
    key, start = DigestKey(SEED, "own"), reduced.bounds(liar).start
    other = next(member for member in reduced.members if member != liar)
    reduced.claims[liar, other] = key.digest(np.array([1]), start)


def equivocates(reduced: AllReduce, liar: PeerId) -> None:
    reduced.changes(liar, next(member for member in reduced.members if member != liar))


def equivocates_to_most(reduced: AllReduce, liar: PeerId) -> None:
    for member in reduced.members:
        if member != liar:
            reduced.changes(liar, member)


def frames(reduced: AllReduce, liar: PeerId) -> None:
    """State another part of the slice of the next member."""
    other = next(member for member in reduced.members if member != liar)
    stated = reduced.parts[liar].copy()
    stated[reduced.bounds(other).start] += 1
    reduced.stated[liar] = stated


def frames_all(reduced: AllReduce, liar: PeerId) -> None:
    reduced.stated[liar] = reduced.parts[liar] + 1


def states_other_result(reduced: AllReduce, liar: PeerId) -> None:
    for reducer in reduced.members:
        if reducer != liar:
            reduced.changes(reducer, liar)


ATTRIBUTED = (changes_sum, equivocates_to_most, frames_all, states_other_result)
DISPUTED = (changes_sum_and_received, equivocates, frames)


@pytest.mark.parametrize("lie", [*ATTRIBUTED, *DISPUTED])
def test_any_lie_breaks_the_totals(lie: Callable[[AllReduce, PeerId], None]) -> None:
    reduced = AllReduce.of(3)
    lie(reduced, reduced.members[1])
    assert not sums.agree(reduced.check())


@pytest.mark.parametrize("lie", ATTRIBUTED)
@pytest.mark.parametrize("size", [3, 4, 5])
def test_a_lie_to_most_others_is_attributed_to_the_liar(
    lie: Callable[[AllReduce, PeerId], None], size: int
) -> None:
    reduced = AllReduce.of(size)
    lie(reduced, reduced.members[1])
    found = reduced.findings()
    assert list(found.lied) == [reduced.members[1]]
    assert found.contradictions == frozenset()


@pytest.mark.parametrize("lie", DISPUTED)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_lie_to_one_member_leaves_a_contradiction_with_that_one(
    lie: Callable[[AllReduce, PeerId], None], size: int
) -> None:
    reduced = AllReduce.of(size)
    liar = reduced.members[-1]
    lie(reduced, liar)
    found = reduced.findings()
    assert found.lied == {}
    assert [set(pair) for pair in found.contradictions] == [{liar, reduced.members[0]}]


@given(
    size=st.integers(3, 7),
    seed=st.integers(0, 2**32),
    lies=st.lists(st.tuples(st.integers(0, 6), st.sampled_from(ATTRIBUTED + DISPUTED)), max_size=5),
)
def test_a_minority_of_liars_is_found_and_no_honest_member_is(
    size: int, seed: int, lies: list[tuple[int, Callable[[AllReduce, PeerId], None]]]
) -> None:
    reduced = AllReduce.of(size, seed)
    most_liars = (size - 1) // 2
    liars = {reduced.members[place % size] for place, _ in lies[:most_liars]}
    for place, lie in lies:
        liar = reduced.members[place % size]
        if liar in liars:
            lie(reduced, liar)
    found = reduced.findings()
    assert found.lied.keys() <= liars
    assert all(liars & set(pair) for pair in found.contradictions)
    if not sums.agree(reduced.check()):
        assert found.lied or found.contradictions


def test_devices_of_one_owner_contradict_as_one() -> None:
    reduced = AllReduce.of(4)
    honest, *others = reduced.members
    for liar in others[:2]:
        frames(reduced, liar)
    alone = reduced.findings({liar: PeerId("owner") for liar in others[:2]})
    assert alone.lied == {}
    assert all(honest in pair for pair in alone.contradictions)


def test_new_identities_do_not_outvote_established_owners() -> None:
    reduced = AllReduce.of(6)
    honest, other, third, *new = reduced.members
    for liar in new:
        frames(reduced, liar)
    frames(reduced, other)

    def established(owners: Collection[PeerId], judged: PeerId) -> set[PeerId]:
        return {honest, other, third} - {judged}

    assert sums.findings(reduced.check(), {}, all_others).lied.keys() == {honest}
    found = sums.findings(reduced.check(), {}, established)
    assert found.lied == {}
    assert found.contradictions == {(honest, liar) for liar in (other, *new)}


# ---- sketches


@given(size=st.integers(2, 6), seed=st.integers(0, 2**32))
def test_sketches_of_honest_members_agree_and_so_do_their_digests(size: int, seed: int) -> None:
    reduced = AllReduce.of(size, seed)
    check = reduced.check(WEIGHTS)
    assert sums.sketches_agree(check)
    assert all(sums.lie_in(check, m, check.slices[m].statement) is None for m in reduced.members)
    assert reduced.findings(weights=WEIGHTS) == sums.Findings({}, frozenset())


@given(size=st.integers(2, 6), place=st.integers(0, 5))
def test_a_false_sketch_is_found_as_a_false_digest_is(size: int, place: int) -> None:
    """What a member states of its slices fits its sketch: then it contradicts the reducer of a
    slice that it has changed."""
    reduced = AllReduce.of(size)
    liar, reducer = reduced.members[0], reduced.members[place % size]
    false = reduced.parts[liar].copy()
    false[reduced.bounds(reducer).start] += 1
    reduced.sketched[liar] = false
    assert sums.agree(reduced.check()), "the digests are right"
    assert not sums.sketches_agree(reduced.check())
    found = reduced.findings(weights=WEIGHTS)
    if reducer == liar:
        assert found == sums.Findings(found.lied, frozenset())
        assert found.lied.keys() == {liar}
    else:
        assert found == sums.Findings({}, frozenset({(reducer, liar)}))


def test_digests_of_slices_that_do_not_fit_the_sketch_that_was_stated_are_a_lie() -> None:
    reduced = AllReduce.of(3)
    check, liar = reduced.check(WEIGHTS), reduced.members[0]
    before = check.totals[liar].statement.checks[0]
    for name in ("part_sketch", "result_sketch"):
        changed_sketch = norm_sketch.from_text(getattr(before, name)).copy()
        changed_sketch[5] += np.uint64(1)
        false = before.model_copy(update={name: norm_sketch.to_text(changed_sketch)})
        check.totals[liar] = SignedSums(statement(liar, false), "by liar")
        assert not sums.sketches_agree(check)
        assert "different digests" in (sums.lie_in(check, liar, check.slices[liar].statement) or "")


# ---- statements by themselves


def changed(check: RoundSums, member: PeerId, **values: object) -> str | None:
    first = check.slices[member].statement
    stated = first.model_copy(
        update={"checks": (first.checks[0].model_copy(update=values), *first.checks[1:])}
    )
    return sums.lie_in(check, member, stated)


def test_a_part_of_a_member_without_anything_that_counts_must_be_zero() -> None:
    reduced = AllReduce.of(3, idle=1)
    idle = reduced.members[-1]
    reduced.parts[idle][0] = 1
    check = replace(reduced.check(), details=False)
    assert sums.agree(check), "the sums are what the members put in"
    assert "nothing of it counts" in (sums.lie_in(check, idle, check.totals[idle].statement) or "")


def test_slices_that_are_too_few_or_do_not_add_up_are_a_lie() -> None:
    check = AllReduce.of(3).check()
    member = PeerId("m0")
    whole = check.slices[member].statement.checks[0]
    one = to_text(1)
    for values, wrong in (
        ({"parts": whole.parts[:2]}, "2 and 3, not 3 each"),
        ({"results": ()}, "3 and 0, not 3 each"),
        ({"received": (one,)}, "received are 1, not 3"),
        ({"parts": (one, *whole.parts[1:])}, "do not add up to what it put in"),
        ({"results": (one, *whole.results[1:])}, "do not add up to what it took out"),
    ):
        assert wrong in (changed(check, member, **values) or ""), values


def test_other_totals_than_before_are_a_lie() -> None:
    reduced = AllReduce.of(3)
    check = reduced.check()
    frames_all(reduced, PeerId("m0"))
    again = statement(PeerId("m0"), reduced.digests(PeerId("m0")))
    assert sums.lie_in(check, PeerId("m0"), again) == "it signed different digests of the same sums"


def test_a_reducer_that_sums_nothing_states_nothing_received() -> None:
    reduced = AllReduce.of(3)
    for part in reduced.parts.values():
        part[reduced.bounds(PeerId("m2"))] = 0
    check = reduced.check()
    first = check.slices[PeerId("m2")].statement
    bare = first.model_copy(
        update={"checks": (first.checks[0].model_copy(update={"received": ()}),)}
    )
    check.slices[PeerId("m2")] = SignedSums(bare, "by m2")
    assert sums.findings(check, {}, all_others) == sums.Findings({}, frozenset())


# ---- several groups


def test_a_moving_member_puts_nothing_into_the_stage_that_it_goes_to() -> None:
    groups = (
        SumGroup("stage 0's average", (PeerId("a"), PeerId("b"))),
        SumGroup("stage 1's average", (PeerId("b"), PeerId("c"))),
    )
    check = RoundSums(groups, {StageIndex(0): (0,), StageIndex(1): (1,)})
    check.add_member(PeerId("a"), StageIndex(0), None, contributes=True)
    check.add_member(PeerId("b"), StageIndex(0), StageIndex(1), contributes=True)
    check.add_member(PeerId("c"), StageIndex(1), None, contributes=True)

    for name, checks in {
        "a": (stated(3, 8),), "b": (stated(5, 8), stated(0, 2)), "c": (stated(2, 2),)
    }.items():  # fmt: skip
        check.record(PeerId(name), SignedSums(statement(PeerId(name), *checks), name))
    assert sums.agree(check)
    assert sums.sketches_agree(check)
    adds = statement(PeerId("b"), stated(5, 8), stated(1, 3))
    assert "stage 1's average" in (sums.lie_in(check, PeerId("b"), adds) or "")
