"""Rows of people: everybody is in exactly one, whatever is bound to whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.base.types import PeerId
from swarm_shared.identity.owners import effective_bindings, group_by_owner, owner_display

A, B, C, D = (PeerId(name) for name in "ABCD")
PEERS = st.sampled_from([A, B, C, D])
BOUND = st.dictionaries(PEERS, PEERS)


def test_devices_stand_in_their_owners_row_and_everybody_else_in_their_own() -> None:
    assert group_by_owner([D, B, A], {B: A, D: C}) == {A: [A, B], C: [D]}


def test_a_chain_and_a_circle_bind_nobody_through_another() -> None:
    assert effective_bindings({A: B, B: C, D: C}) == {B: C, D: C}
    assert effective_bindings({A: B, B: A}) == {}
    assert effective_bindings({A: A}) == {}


@given(st.sets(PEERS), BOUND)
def test_everybody_is_in_exactly_one_row_and_no_rows_owner_is_in_anothers(
    peers: set[PeerId], bound: dict[PeerId, PeerId]
) -> None:
    stands = effective_bindings(bound)
    found = group_by_owner(peers, stands)
    assert sorted(one for devices in found.values() for one in devices) == sorted(peers)
    assert not set(stands) & set(found), "who is bound has no row"
    for person, devices in found.items():
        assert all(one == person or bound[one] == person for one in devices)


def test_an_owners_own_word_counts_before_those_of_devices() -> None:
    words = {B: "bert", C: "carl"}
    assert owner_display(A, [B, C], words) == "bert"
    assert owner_display(A, [B, C], {**words, A: "anna"}) == "anna"
    assert owner_display(A, [B, C], {**words, A: None}) is None
    assert owner_display(A, [A], {}) is None
