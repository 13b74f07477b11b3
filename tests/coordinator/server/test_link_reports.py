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


def saved(heard: LinkReports) -> dict[PeerId, tuple[LinkBytes, ...]]:
    """All that is to be saved now."""
    return {peer: links for few in heard.unsaved_links() for peer, links in few.items()}


def paths_of(heard: LinkReports) -> tuple[LinkPath, ...]:
    return heard.paths({ANNA, BERT}).get(ANNA, ())


def test_what_did_not_change_is_still_known() -> None:
    heard = reports()
    ways = (path("b"), path("c"))
    hear(heard, 1, changed_links=(link("b", 1), link("c", 2)), changed_paths=ways)
    hear(heard, 1)
    hear(heard, 1, changed_links=(link("b", 5),), changed_paths=(path("b", rtt_seconds=0.1),))
    assert set(heard.links()[ANNA]) == {link("b", 5), link("c", 2)}
    assert set(paths_of(heard)) == {path("b", rtt_seconds=0.1), path("c")}
    hear(heard, 1, lost_paths=("b",))
    assert paths_of(heard) == (path("c"),)


def test_a_new_session_begins_with_nothing_known() -> None:
    heard = reports()
    hear(heard, 1, changed_links=(link("b", 7),), changed_paths=(path("b"),))
    hear(heard, 2)
    assert paths_of(heard) == ()
    assert ANNA not in heard.links(), "a client that was started again counts from nothing"


def test_an_attachment_that_was_replaced_adds_nothing() -> None:
    heard = reports()
    hear(heard, 2, changed_paths=(path("b"),))
    hear(heard, 1, changed_paths=(path("c"),), changed_links=(link("c", 9),), lost_paths=("b",))
    assert paths_of(heard) == (path("b"),)
    assert saved(heard) == {}


def test_what_was_heard_is_saved_once() -> None:
    heard = reports()
    hear(heard, 1, changed_links=(link("b", 1), link("c", 2)))
    hear(heard, 1, changed_links=(link("b", 3),))
    assert set(saved(heard)[ANNA]) == {link("b", 3), link("c", 2)}
    hear(heard, 1, changed_links=(link("c", 4),))
    assert saved(heard) == {ANNA: (link("c", 4),)}
    assert saved(heard) == {}


def test_links_of_many_are_saved_a_few_at_a_time_and_then_the_coordinators_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REPORTERS_AT_ONCE", 2)
    monkeypatch.setattr(module, "LINKS_AT_ONCE", 2)
    own = tuple(link(f"peer {number}", number) for number in range(3))
    monkeypatch.setattr(OwnNode, "link_bytes", lambda self: own)
    heard = reports()
    for number in range(3):
        hear(heard, 1, PeerId(f"peer {number}"), changed_links=(link("b", number),))
    saving = heard.unsaved_links()
    assert list(next(saving)) == ["peer 0", "peer 1"]
    # Heard meanwhile: in this turn of whoever still waits, in the next one of whoever has had it.
    hear(heard, 1, PeerId("peer 0"), changed_links=(link("b", 8),))
    hear(heard, 1, PeerId("peer 2"), changed_links=(link("b", 9),))
    assert list(saving) == [
        {PeerId("peer 2"): (link("b", 9),)}, {OWN: own[:2]}, {OWN: own[2:]},
    ]  # fmt: skip
    assert next(heard.unsaved_links()) == {PeerId("peer 0"): (link("b", 8),)}


def test_what_was_not_taken_to_be_saved_stays_unsaved() -> None:
    heard = reports()
    hear(heard, 1, changed_links=(link("b", 1),))
    heard.unsaved_links()
    assert saved(heard) == {ANNA: (link("b", 1),)}


def test_no_reporter_takes_more_memory_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 4 * MIN_REMEMBERED_PER_REPORTER)
    heard = reports()
    hear(heard, 1, peer=BERT)
    hear(heard, 1, changed_paths=(path(OWN),))
    for number in range(100):
        name = f"made-up-{number}"
        hear(heard, 1, changed_links=(link(name, 1),), changed_paths=(path(name),))
    newest = [f"made-up-{number}" for number in range(100 - 2 * MIN_REMEMBERED_PER_REPORTER, 100)]
    assert [one.remote for one in heard.links()[ANNA]] == newest
    assert [one.remote for one in paths_of(heard)] == [OWN, *newest[1:]], "its way to here is kept"


def test_of_those_that_have_gone_the_last_ones_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_DETACHED_REPORTERS", 2)
    heard = reports()
    for name in ("a", "b", "c", "d"):
        hear(heard, 1, peer=PeerId(name), changed_links=(link("x", 1),))
    heard.paths({PeerId("a")})
    assert heard.links().keys() == {"a", "c", "d", OWN}


def test_links_and_paths_to_peers_that_are_not_of_the_run_take_no_place() -> None:
    """An admitted member reports links that it made up, as many as fit into 300 heartbeats."""
    heard = LinkReports(OwnNode(), {BERT}.__contains__)  # type: ignore[arg-type]
    for number in range(300):
        names = [named(f"{letter}{number + 1111}".replace("0", "a")) for letter in "abcdefgh"]
        rows = tuple(link(name, number) for name in names)
        hear(heard, 1, changed_links=rows, changed_paths=tuple(path(name) for name in names))
    hear(heard, 1, changed_links=(link(BERT, 1), link(OWN, 2)), changed_paths=(path(BERT),))
    hear(heard, 2, peer=BERT, changed_links=(link(ANNA, 3),))
    assert heard.links() == {ANNA: (link(BERT, 1), link(OWN, 2)), BERT: (link(ANNA, 3),), OWN: ()}
    assert paths_of(heard) == (path(BERT),)
    assert saved(heard) == {ANNA: (link(BERT, 1), link(OWN, 2)), BERT: (link(ANNA, 3),)}


def test_the_coordinators_links_to_strangers_are_neither_shown_nor_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strangers = tuple(link(f"stranger-{number}", 1) for number in range(3))
    own = (link(ANNA, 1), *strangers, link(BERT, 2))
    monkeypatch.setattr(OwnNode, "link_bytes", lambda self: own)
    heard = LinkReports(OwnNode(), {BERT}.__contains__)  # type: ignore[arg-type]
    hear(heard, 1, ANNA)  # and has left since
    assert heard.links()[OWN] == (link(ANNA, 1), link(BERT, 2))
    assert saved(heard)[OWN] == (link(ANNA, 1), link(BERT, 2))


def test_links_of_made_up_protocols_take_no_place() -> None:
    heard = reports()
    for number in range(1_000):
        one = LinkBytes(remote=BERT, protocol=f"/made-up/{number}", sent=1, received=1)
        hear(heard, 1, changed_links=(one,))
    assert len(heard.links()[ANNA]) == len(saved(heard)[ANNA]) == module.MAX_PROTOCOLS


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
    heard, telling, session = reports(), HeartbeatDelta(1.0), 1
    for number, state in enumerate([*states, *(40 if members > 3 else 1) * [states[-1]]]):
        if number == lost_after:
            # The coordinator was started again: it knows nothing, and the client begins anew.
            heard, telling, session = reports(), HeartbeatDelta(1.0), session + 1
        links = tuple(link(remote, sent) for remote, (sent, _, _) in state.items())
        ways = tuple(path(remote, kind=k, rtt_seconds=r) for remote, (_, k, r) in state.items())
        present = HeartbeatSnapshot(1.0, 0, 0.0, links, ways, False, 0, 0.0)
        said = parse(client_messages, encode(telling.heartbeat(present, members)))
        assert isinstance(said, Heartbeat)
        heard.record(SessionNumber(session), ANNA, said)
        if members == 3:
            assert {one.remote for one in paths_of(heard)} == set(state), "all of it at once"
    known = {one.remote: one for one in paths_of(heard)}
    assert known.keys() == {way.remote for way in ways}
    assert all(alike(known[way.remote], way) for way in ways)
    assert set(links) <= set(heard.links().get(ANNA, ()))
