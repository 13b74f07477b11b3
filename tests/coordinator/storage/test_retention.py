"""Rows that any admitted peer can add to: the oldest of them go, and the run's history stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kits.coordinator.run import ANNA, one_start_at, step, write
from kits.peer_names import named
from swarm_coordinator.core.events import (
    HeldAccountRecord,
    HeldTimeRecord,
    Note,
    StageShare,
)
from swarm_coordinator.storage import retention
from swarm_coordinator.storage.connection import DatabaseLocation
from swarm_coordinator.storage.database import open_for_reading
from swarm_coordinator.storage.history import history
from swarm_coordinator.storage.records import LinksReported, PeerSeen, RowsPruned
from swarm_coordinator.storage.store import Store
from swarm_shared.base.types import MAX_EXACT_INTEGER, PeerId, StageIndex, Step
from swarm_shared.protocol import LinkBytes

OWNER = named("Berta")
STEP = replace(step(1), shares=(StageShare(ANNA, StageIndex(0), 4, 64),))


def letters(number: int) -> str:
    return "".join("abcdefghij"[int(digit)] for digit in f"{number:05}")


def link(number: int) -> LinkBytes:
    return LinkBytes(remote=named(letters(number)), protocol="/a/1", sent=number, received=0)


def counts(place: DatabaseLocation) -> dict[str, int]:
    tables = ("peers", "notes", "links", "teams", "owners", "shares")
    with open_for_reading(place) as connection:
        return {
            table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in tables
        }


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a test reaches."""
    for name, most in (
        ("LINKS", 5), ("LINK_ROWS", 8), ("NOTES", 7), ("IDLE_PEERS", 3), ("HELD_ACCOUNTS", 3)
    ):  # fmt: skip
        monkeypatch.setattr(retention, f"MAX_{name}", most)


@pytest.mark.usefixtures("few")
def test_identities_without_end_leave_few_rows_and_the_history_stays(
    place: DatabaseLocation,
) -> None:
    strangers = [named(letters(number)) for number in range(50)]
    one_start_at(
        place,
        PeerSeen(OWNER, "Berta"), PeerSeen(ANNA, "Anna", "team", None), STEP,
        *(PeerSeen(peer, "x" * 60, "team") for peer in strangers),
        *(Note("has joined", peer) for peer in strangers),
        RowsPruned(),
    )  # fmt: skip
    assert counts(place) == {
        "peers": 5, "notes": 7, "links": 0, "teams": 5, "owners": 0, "shares": 1,
    }  # fmt: skip
    with open_for_reading(place) as connection:
        kept = {peer for (peer,) in connection.execute("SELECT peer FROM peers")}
    assert kept == {ANNA, *strangers[-4:]}, "the one that counted, and the newest"
    assert [step.step for step in history(place).steps] == [1]
    assert len(history(place).notes) == 7


@pytest.mark.usefixtures("few")
def test_links_without_end_leave_the_newest_rows_of_each_reporter(place: DatabaseLocation) -> None:
    one_start_at(
        place, PeerSeen(ANNA), PeerSeen(OWNER),
        *(LinksReported({ANNA: (link(number),)}) for number in range(20)),
        *(LinksReported({OWNER: (link(number),)}) for number in range(20)),
        RowsPruned(),
    )  # fmt: skip
    of: dict[PeerId, list[int]] = {}
    for row in history(place).links:
        of.setdefault(row.reporter, []).append(row.sent)
    assert {peer: sorted(sent) for peer, sent in of.items()} == {
        ANNA: [17, 18, 19], OWNER: [15, 16, 17, 18, 19],
    }  # fmt: skip


def test_a_count_that_jumps_for_ever_keeps_no_rows_out(store: Store) -> None:
    most = LinkBytes(remote=OWNER, protocol="/a/1", sent=MAX_EXACT_INTEGER, received=0)
    jumps = (most, most.model_copy(update={"sent": 0}))
    write(store, *(LinksReported({ANNA: (one,)}) for one in jumps * 1100))
    write(store, LinksReported({ANNA: (jumps[0],), OWNER: (link(1),)}))
    found = store.read(lambda db: db.execute("SELECT sent, sent_before FROM links").fetchall())
    assert sorted(found) == [(1, 0), (MAX_EXACT_INTEGER, 2 * MAX_EXACT_INTEGER)]


@pytest.mark.usefixtures("few")
def test_held_seconds_of_identities_without_end_leave_those_that_are_forgotten_last(
    store: Store,
) -> None:
    held = [
        HeldAccountRecord(named(letters(number)), 1000.0 + 10.0 * (number % 17))
        for number in range(17)
    ]
    write(store, HeldTimeRecord(tuple(held)), RowsPruned())
    left = {one.account for one in store.restore().held_time}
    assert left == {named(letters(number)) for number in (14, 15, 16)}


def test_what_an_ordinary_run_writes_is_kept(place: DatabaseLocation) -> None:
    before = (
        PeerSeen(ANNA, "Anna"), STEP, Note("it begins", None),
        LinksReported({ANNA: (link(1), link(2))}), replace(STEP, step=Step(2)),
    )  # fmt: skip
    one_start_at(place, *before)
    kept = counts(place)
    one_start_at(place, RowsPruned())
    assert counts(place) == kept
