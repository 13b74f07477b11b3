"""What the coordinator knows of links and paths, from clients that say only what has changed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.peer_names import named
from swarm_coordinator.core.events import SessionNumber
from swarm_coordinator.server import link_reports as module
from swarm_coordinator.server.link_reports import MIN_REMEMBERED_PER_REPORTER, LinkReports
from swarm_shared.base.types import PeerId
from swarm_shared.protocol import (
    Heartbeat,
    LinkBytes,
    LinkPath,
    PathKind,
    client_messages,
    encode,
    parse,
)
from swarm_shared.volunteer_rules.heartbeat import HeartbeatDelta, HeartbeatSnapshot, alike

ANNA, BERT = PeerId("anna"), PeerId("bert")
OWN = PeerId("the coordinator")


class OwnNode:
    """A node without links."""

    peer_id = OWN

    def link_bytes(self) -> tuple[LinkBytes, ...]:
        return ()

    def paths(self) -> list[LinkPath]:
        return []


def reports() -> LinkReports:
    return LinkReports(OwnNode(), lambda peer: True)  # type: ignore[arg-type]


def link(remote: str, sent: int) -> LinkBytes:
    return LinkBytes(remote=PeerId(remote), protocol="/a/1", sent=sent, received=0)


def path(remote: str, **changes: Any) -> LinkPath:
    said = {"kind": PathKind.DIRECT, "rtt_seconds": 0.05, **changes}
    return LinkPath(remote=PeerId(remote), **said)


def hear(into: LinkReports, session: int, peer: PeerId = ANNA, **said: Any) -> None:
    into.record(SessionNumber(session), peer, Heartbeat(**said))


def saved(told: LinkReports) -> dict[PeerId, tuple[LinkBytes, ...]]:
    """All that is to be saved now."""
    return {peer: links for few in told.unsaved_links() for peer, links in few.items()}


def paths_of(told: LinkReports) -> tuple[LinkPath, ...]:
    return told.paths({ANNA, BERT}).get(ANNA, ())


def test_what_did_not_change_is_still_known() -> None:
    told = reports()
    ways = (path("b"), path("c"))
    hear(told, 1, changed_links=(link("b", 1), link("c", 2)), changed_paths=ways)
    hear(told, 1)
    hear(told, 1, changed_links=(link("b", 5),), changed_paths=(path("b", rtt_seconds=0.1),))
    assert set(told.links()[ANNA]) == {link("b", 5), link("c", 2)}
    assert set(paths_of(told)) == {path("b", rtt_seconds=0.1), path("c")}
    hear(told, 1, lost_paths=("b",))
    assert paths_of(told) == (path("c"),)


def test_a_new_session_begins_with_nothing_known() -> None:
    told = reports()
    hear(told, 1, changed_links=(link("b", 7),), changed_paths=(path("b"),))
    hear(told, 2)
    assert paths_of(told) == ()
    assert ANNA not in told.links(), "a client that was started again counts from nothing"


def test_an_attachment_that_was_replaced_adds_nothing() -> None:
    told = reports()
    hear(told, 2, changed_paths=(path("b"),))
    hear(told, 1, changed_paths=(path("c"),), changed_links=(link("c", 9),), lost_paths=("b",))
    assert paths_of(told) == (path("b"),)
    assert saved(told) == {}


def test_what_was_heard_is_saved_once() -> None:
    told = reports()
    hear(told, 1, changed_links=(link("b", 1), link("c", 2)))
    hear(told, 1, changed_links=(link("b", 3),))
    assert set(saved(told)[ANNA]) == {link("b", 3), link("c", 2)}
    hear(told, 1, changed_links=(link("c", 4),))
    assert saved(told) == {ANNA: (link("c", 4),)}
    assert saved(told) == {}


def test_links_of_many_are_saved_a_few_at_a_time_and_then_the_coordinators_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REPORTERS_AT_ONCE", 2)
    monkeypatch.setattr(module, "LINKS_AT_ONCE", 2)
    own = tuple(link(f"peer {number}", number) for number in range(3))
    monkeypatch.setattr(OwnNode, "link_bytes", lambda self: own)
    told = reports()
    for number in range(3):
        hear(told, 1, PeerId(f"peer {number}"), changed_links=(link("b", number),))
    saving = told.unsaved_links()
    assert list(next(saving)) == ["peer 0", "peer 1"]
    # Heard meanwhile: in this turn of whoever still waits, in the next one of whoever has had it.
    hear(told, 1, PeerId("peer 0"), changed_links=(link("b", 8),))
    hear(told, 1, PeerId("peer 2"), changed_links=(link("b", 9),))
    assert list(saving) == [
        {PeerId("peer 2"): (link("b", 9),)}, {OWN: own[:2]}, {OWN: own[2:]},
    ]  # fmt: skip
    assert next(told.unsaved_links()) == {PeerId("peer 0"): (link("b", 8),)}


def test_what_was_not_taken_to_be_saved_stays_unsaved() -> None:
    told = reports()
    hear(told, 1, changed_links=(link("b", 1),))
    told.unsaved_links()
    assert saved(told) == {ANNA: (link("b", 1),)}


def test_no_reporter_takes_more_memory_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 4 * MIN_REMEMBERED_PER_REPORTER)
    told = reports()
    hear(told, 1, peer=BERT)
    hear(told, 1, changed_paths=(path(OWN),))
    for number in range(100):
        name = f"made-up-{number}"
        hear(told, 1, changed_links=(link(name, 1),), changed_paths=(path(name),))
    newest = [f"made-up-{number}" for number in range(100 - 2 * MIN_REMEMBERED_PER_REPORTER, 100)]
    assert [one.remote for one in told.links()[ANNA]] == newest
    assert [one.remote for one in paths_of(told)] == [OWN, *newest[1:]], "its way to here is kept"


def test_of_those_that_have_gone_the_last_ones_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_DETACHED_REPORTERS", 2)
    told = reports()
    for name in ("a", "b", "c", "d"):
        hear(told, 1, peer=PeerId(name), changed_links=(link("x", 1),))
    told.paths({PeerId("a")})
    assert told.links().keys() == {"a", "c", "d", OWN}


def test_links_and_paths_to_peers_that_are_not_of_the_run_take_no_place() -> None:
    """An admitted member reports links that it made up, as many as fit into 300 heartbeats."""
    told = LinkReports(OwnNode(), {BERT}.__contains__)  # type: ignore[arg-type]
    for number in range(300):
        names = [named(f"{letter}{number + 1111}".replace("0", "a")) for letter in "abcdefgh"]
        rows = tuple(link(name, number) for name in names)
        hear(told, 1, changed_links=rows, changed_paths=tuple(path(name) for name in names))
    hear(told, 1, changed_links=(link(BERT, 1), link(OWN, 2)), changed_paths=(path(BERT),))
    hear(told, 2, peer=BERT, changed_links=(link(ANNA, 3),))
    assert told.links() == {ANNA: (link(BERT, 1), link(OWN, 2)), BERT: (link(ANNA, 3),), OWN: ()}
    assert paths_of(told) == (path(BERT),)
    assert saved(told) == {ANNA: (link(BERT, 1), link(OWN, 2)), BERT: (link(ANNA, 3),)}


def test_the_coordinators_links_to_strangers_are_neither_shown_nor_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strangers = tuple(link(f"stranger-{number}", 1) for number in range(3))
    own = (link(ANNA, 1), *strangers, link(BERT, 2))
    monkeypatch.setattr(OwnNode, "link_bytes", lambda self: own)
    told = LinkReports(OwnNode(), {BERT}.__contains__)  # type: ignore[arg-type]
    hear(told, 1, ANNA)  # and has left since
    assert told.links()[OWN] == (link(ANNA, 1), link(BERT, 2))
    assert saved(told)[OWN] == (link(ANNA, 1), link(BERT, 2))


def test_links_of_made_up_protocols_take_no_place() -> None:
    told = reports()
    for number in range(1_000):
        one = LinkBytes(remote=BERT, protocol=f"/made-up/{number}", sent=1, received=1)
        hear(told, 1, changed_links=(one,))
    assert len(told.links()[ANNA]) == len(saved(told)[ANNA]) == module.MAX_PROTOCOLS


STATES = st.lists(
    st.dictionaries(
        st.sampled_from([named(name) for name in "bcde"]),
        st.tuples(st.integers(0, 3), st.sampled_from(PathKind), st.sampled_from([0.01, 0.1])),
    ),
    min_size=1, max_size=8,
)  # fmt: skip


@settings(max_examples=100)
@given(STATES, st.sampled_from([3, 2_000]), st.integers(0, 7))
def test_whatever_changes_and_whenever_a_session_is_lost_everything_is_known_in_the_end(
    states: list[dict[str, tuple[int, PathKind, float]]], members: int, lost_after: int
) -> None:
    told, telling, session = reports(), HeartbeatDelta(1.0), 1
    for number, state in enumerate([*states, *(40 if members > 3 else 1) * [states[-1]]]):
        if number == lost_after:
            # The coordinator was started again: it knows nothing, and the client begins anew.
            told, telling, session = reports(), HeartbeatDelta(1.0), session + 1
        links = tuple(link(remote, sent) for remote, (sent, _, _) in state.items())
        ways = tuple(path(remote, kind=k, rtt_seconds=r) for remote, (_, k, r) in state.items())
        present = HeartbeatSnapshot(1.0, 0, 0.0, links, ways, False, 0, 0.0)
        said = parse(client_messages, encode(telling.heartbeat(present, members)))
        assert isinstance(said, Heartbeat)
        told.record(SessionNumber(session), ANNA, said)
        if members == 3:
            assert {one.remote for one in paths_of(told)} == set(state), "all of it at once"
    known = {one.remote: one for one in paths_of(told)}
    assert known.keys() == {way.remote for way in ways}
    assert all(alike(known[way.remote], way) for way in ways)
    assert set(links) <= set(told.links().get(ANNA, ()))
