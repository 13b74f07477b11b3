"""Outsized parts: what the parts of others let expect of a member's."""

from __future__ import annotations

import math
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_coordinator.core.trust.part_norms import MAX_RATIO, PutIn, outsized
from swarm_shared.base.types import PeerId


def all_others(owners: Collection[PeerId], judged: PeerId) -> set[PeerId]:
    return set(owners) - {judged}


def parts(**norms: float) -> dict[PeerId, PutIn]:
    """One microbatch of each owner."""
    return {PeerId(name): PutIn(PeerId(name), 1, norm) for name, norm in norms.items()}


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_a_part_may_be_four_times_as_large_as_those_of_others(count: int) -> None:
    others = {f"m{number}": 1.0 for number in range(count)}
    assert outsized(parts(a=MAX_RATIO, **others), all_others) == {}
    assert outsized(parts(a=2 * MAX_RATIO, **others), all_others) == {"a": 2 * MAX_RATIO}


def test_a_member_alone_is_compared_with_nothing() -> None:
    assert outsized(parts(a=1e9), all_others) == {}


def test_beside_others_that_put_in_nothing_any_part_is_outsized() -> None:
    assert outsized(parts(a=1e-9, b=0.0, c=0.0), all_others) == {"a": math.inf}
    assert outsized(parts(a=0.0, b=0.0), all_others) == {}


@given(
    gradients=st.lists(st.floats(1.0, MAX_RATIO), min_size=1, max_size=9),
    counts=st.lists(st.integers(1, 9), min_size=9, max_size=9),
    aligned=st.booleans(),
)
def test_members_whose_gradients_have_like_norms_are_never_outsized(
    gradients: list[float], counts: list[int], aligned: bool
) -> None:
    """However many microbatches each has, and whether gradients point the same way or are
    independent."""
    members = {
        PeerId(f"m{place}"): PutIn(
            PeerId(f"m{place}"), n, 0.999 * norm * (n if aligned else math.sqrt(n))
        )
        for place, (norm, n) in enumerate(zip(gradients, counts, strict=False))
    }
    assert outsized(members, all_others) == {}


@given(
    honest=st.lists(st.floats(1.0, 2.0), min_size=3, max_size=9),
    false=st.lists(st.one_of(st.floats(0.0, 0.1), st.floats(1e3, 1e9)), max_size=4),
)
def test_a_minority_makes_no_honest_part_outsized_and_hides_no_large_one(
    honest: list[float], false: list[float]
) -> None:
    false = false[: (len(honest) - 1) // 2]
    named = {f"h{n}": norm for n, norm in enumerate(honest)}
    lies = {f"l{n}": norm for n, norm in enumerate(false)}
    assert outsized(parts(**named, **lies), all_others).keys() == {
        name for name, norm in lies.items() if norm > 2 * MAX_RATIO
    }


def test_an_owner_suggests_one_norm_for_all_of_its_members() -> None:
    members = parts(a=10.0, b=1.0, c=1.0)
    members |= {PeerId(f"more{n}"): PutIn(PeerId("a"), 1, 10.0) for n in range(8)}
    assert outsized(members, all_others).keys() == {"a"} | {f"more{n}" for n in range(8)}


@pytest.mark.parametrize("norms", [(1.0, 10.0), (10.0, 1.0)])
def test_an_owner_s_largest_part_is_what_it_suggests(norms: tuple[float, float]) -> None:
    members = parts(a=30.0)
    members |= {PeerId(f"b{n}"): PutIn(PeerId("b"), 1, norm) for n, norm in enumerate(norms)}
    assert outsized(members, all_others) == {}


def test_only_those_judge_that_may() -> None:
    members = parts(a=10.0, b=1.0, c=9.0, d=9.0)
    assert "a" in outsized(members, lambda _, __: {PeerId("b")})
    assert "a" not in outsized(members, all_others)
