"""The bytes of links: whose are remembered, however many remotes there are."""

from __future__ import annotations

import pytest

from swarm_shared.base.types import PeerId
from swarm_shared.network import framed_stream
from swarm_shared.network.framed_stream import LinkTraffic, TrafficCounter

A, B = PeerId("a"), PeerId("b")


@pytest.fixture
def members() -> set[PeerId]:
    return {A}


@pytest.fixture
def counter(members: set[PeerId], monkeypatch: pytest.MonkeyPatch) -> TrafficCounter:
    monkeypatch.setattr(framed_stream, "MAX_LINKS", 10)
    return TrafficCounter(members.__contains__)


def opened(counter: TrafficCounter, remote: PeerId, *, member: bool) -> LinkTraffic:
    link = counter.link(remote, "/test/1", lasts=member)
    link.received += 5
    return link


def counted(counter: TrafficCounter) -> dict[PeerId, int]:
    return {link.remote: link.received for link in counter.link_bytes()}


def test_strangers_take_no_place_of_a_member(counter: TrafficCounter) -> None:
    for number in range(1000):
        opened(counter, PeerId(f"stranger {number}"), member=False)
    opened(counter, A, member=True)
    opened(counter, A, member=True)
    assert counted(counter) == {A: 10}


def test_what_a_stranger_sent_before_it_was_a_member_counts(
    counter: TrafficCounter, members: set[PeerId]
) -> None:
    stream = opened(counter, B, member=False)
    members.add(B)
    assert counted(counter) == {B: 5}
    del stream
    assert counted(counter) == {B: 5}


def test_members_that_have_gone_give_their_places_to_others(
    counter: TrafficCounter, members: set[PeerId]
) -> None:
    gone = [PeerId(f"gone {number}") for number in range(100)]
    streams = {remote: opened(counter, remote, member=True) for remote in gone}
    open_still = streams.pop(gone[0])
    streams.clear()
    assert counted(counter) == {gone[0]: 5}
    opened(counter, A, member=True)
    assert counted(counter) == {gone[0]: 5, A: 5}
    open_still.received += 1
    assert counted(counter)[gone[0]] == 6


def test_few_links_are_remembered_when_their_remotes_have_gone(
    counter: TrafficCounter, members: set[PeerId]
) -> None:
    opened(counter, A, member=True)
    members.clear()
    assert counted(counter) == {A: 5}
