"""Rows that any admitted peer can add to: the oldest of them go, and the run's history stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from kits.peer_names import named
from swarm_coordinator.core.events import (
    AppliedStep,
    HeldAccountRecord,
    HeldTimeRecord,
    Note,
    StageShare,
)
from swarm_coordinator.storage import records, retention
from swarm_coordinator.storage.connection import DatabaseLocation
from swarm_coordinator.storage.database import open_for_reading
from swarm_coordinator.storage.history import history
from swarm_coordinator.storage.records import LinksReported, PeerSeen, RowsPruned
from swarm_coordinator.storage.store import open_store
from swarm_shared.base.types import PeerId, StageIndex, Step
from swarm_shared.protocol import LinkBytes

ANNA, OWNER = named("Anna"), named("Berta")
STEP = AppliedStep(
    step=Step(1), attempt=1, loss=2.0, tokens=64, seconds=0.5, global_norm=1.5, learning_rate=1e-3,
    shares=(StageShare(ANNA, StageIndex(0), 4, 64),),
)  # fmt: skip


def letters(number: int) -> str:
    return "".join("abcdefghij"[int(digit)] for digit in f"{number:05}")


def link(number: int) -> LinkBytes:
    return LinkBytes(remote=named(letters(number)), protocol="/a/1", sent=number, received=0)


def write_all(place: DatabaseLocation, *all_records: records.Record) -> None:
    store = open_store(place)
    store.next_generation()

    async def main() -> None:
        for record in all_records:
            await store.write(record)

    trio.run(main)
    store.close()


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
    write_all(
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
    write_all(
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


@pytest.mark.usefixtures("few")
def test_held_seconds_of_identities_without_end_leave_those_that_are_forgotten_last(
    place: DatabaseLocation,
) -> None:
    held = [
        HeldAccountRecord(named(letters(number)), 1000.0 + 10.0 * (number % 17))
        for number in range(17)
    ]
    write_all(place, HeldTimeRecord(tuple(held)), RowsPruned())
    store = open_store(place)
    left = {one.account for one in store.restore().held_time}
    store.close()
    assert left == {named(letters(number)) for number in (14, 15, 16)}


def test_what_an_ordinary_run_writes_is_kept(place: DatabaseLocation) -> None:
    before = (
        PeerSeen(ANNA, "Anna"), STEP, Note("it begins", None),
        LinksReported({ANNA: (link(1), link(2))}), replace(STEP, step=Step(2)),
    )  # fmt: skip
    write_all(place, *before)
    kept = counts(place)
    write_all(place, RowsPruned())
    assert counts(place) == kept
