"""Admission rules, and that the database agrees with memory after any history."""

from __future__ import annotations

import functools
import sqlite3
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from swarm_coordinator.admission.book import (
    AdmissionBook,
    AdmissionRecord,
    MemberAdmitted,
    PeerAllowed,
    PeerBanned,
    PeerDisallowed,
    PeerUnbanned,
    TokenCreated,
    TokenRevoked,
    TokenState,
    hash_of,
)
from swarm_coordinator.storage.admission_rows import (
    insert_admission,
    read_admission,
    read_seen_since,
)
from swarm_coordinator.storage.records import PeerSeen
from swarm_coordinator.storage.sqlite import create_schema, open_for_writing
from swarm_coordinator.storage.store import SqliteStore
from swarm_shared.base.errors import AdmissionError
from swarm_shared.base.types import PeerId

NOW = 1_900_000_000.0
ANNA, BERT, CARL = PeerId("12D3KooWAnna"), PeerId("12D3KooWBert"), PeerId("12D3KooWCarl")


def book_of(*records: AdmissionRecord) -> AdmissionBook:
    book = AdmissionBook()
    for record in records:
        book.enter(record, NOW)
    return book


def token(number: int = 1, secret: str = "secret", **changes: object) -> TokenCreated:
    return TokenCreated(number, hash_of(secret), **changes)  # type: ignore[arg-type]


# ---------------------------------------------------------------- tokens


def test_a_token_admits_as_many_peers_as_it_has_uses() -> None:
    book = book_of(token(uses=2))
    for peer, left in ((ANNA, 1), (BERT, 0)):
        book.enter(MemberAdmitted(peer, book.usable_token("secret", NOW).token), NOW)
        assert book.uses_left(book.tokens[1]) == left
    with pytest.raises(AdmissionError, match="was used already, as often as it could be"):
        book.usable_token("secret", NOW)


def test_a_peer_that_returns_does_not_use_the_token_again() -> None:
    book = book_of(token(uses=1), MemberAdmitted(ANNA, 1), MemberAdmitted(ANNA, 1))
    assert book.uses_left(book.tokens[1]) == 0
    assert book.refusal("token", ANNA) is None


@pytest.mark.parametrize(
    ("secret", "changes", "revoked", "reason"),
    [
        (None, {}, False, "the invite carries no token"),
        ("", {}, False, "the invite carries no token"),
        ("Secret", {}, False, "is not the right one"),
        ("secret", {"expires_at": NOW}, False, "has expired"),
        ("secret", {}, True, "was revoked by the organiser"),
    ],
)
def test_a_token_that_admits_no_peer_gives_the_reason(
    secret: str | None, changes: dict[str, object], revoked: bool, reason: str
) -> None:
    book = book_of(token(**changes), *([TokenRevoked(1)] if revoked else []))
    with pytest.raises(AdmissionError, match=reason):
        book.usable_token(secret, NOW)


def test_an_expired_token_keeps_the_peers_that_it_has_admitted() -> None:
    book = book_of(token(expires_at=NOW + 60), MemberAdmitted(ANNA, 1))
    assert book.usable_token("secret", NOW + 59).token == 1
    assert book.state_of(book.tokens[1], NOW + 60) is TokenState.EXPIRED
    assert book.refusal("token", ANNA) is None


def test_revoking_a_token_ends_the_membership_of_peers_without_another_token() -> None:
    book = book_of(
        token(1), token(2, "other"), MemberAdmitted(ANNA, 1), MemberAdmitted(BERT, 1),
        MemberAdmitted(BERT, 2), TokenRevoked(1),
    )  # fmt: skip
    assert book.affected_by(TokenRevoked(1)) == (ANNA, BERT)
    refusal = book.refusal("token", ANNA)
    assert refusal is not None
    assert "has revoked the token that let this peer in" in refusal
    assert book.refusal("token", BERT) is None
    assert book.members("token") == {BERT}


def test_an_admission_that_could_not_be_written_down_gives_the_use_back() -> None:
    book = book_of(token(uses=1), MemberAdmitted(ANNA, 1))
    book.withdraw(MemberAdmitted(ANNA, 1))
    assert book.uses_left(book.tokens[1]) == 1
    assert book.refusal("token", ANNA) is not None


def test_members_are_counted_once_and_not_for_every_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """A published token admits any number of peers."""
    book = book_of(token(), *(MemberAdmitted(peer, 1) for peer in (ANNA, BERT)))
    assert book.members("token") == {ANNA, BERT}
    asked: list[PeerId] = []
    monkeypatch.setattr(AdmissionBook, "is_member", lambda _, peer: asked.append(peer) or True)
    book.enter(MemberAdmitted(CARL, 1), NOW)
    assert book.members("token") == {ANNA, BERT, CARL}
    assert asked == [CARL]


def test_the_secret_of_a_token_is_in_no_record() -> None:
    book = book_of(token(secret="do not tell"))
    assert "do not tell" not in repr(book)


# ---------------------------------------------------------------- modes


def test_the_mode_decides_what_counts() -> None:
    book = book_of(token(), MemberAdmitted(ANNA, 1), PeerAllowed(BERT))
    may = {
        mode: {p for p in (ANNA, BERT, CARL) if book.refusal(mode, p) is None}
        for mode in ("open", "token", "allow-list")
    }
    assert may == {"open": {ANNA, BERT, CARL}, "token": {ANNA}, "allow-list": {BERT}}


@pytest.mark.parametrize("mode", ["open", "token", "allow-list"])
def test_a_ban_counts_in_every_mode_until_it_is_lifted(mode) -> None:
    book = book_of(token(), MemberAdmitted(ANNA, 1), PeerAllowed(ANNA), PeerBanned(ANNA, "cheats"))
    assert book.refusal(mode, ANNA) == ("the organiser has banned this peer from the run: cheats")
    assert ANNA not in book.members(mode)
    book.enter(PeerUnbanned(ANNA), NOW)
    assert book.refusal(mode, ANNA) is None


def test_a_peer_that_is_not_on_the_list_learns_what_to_give_the_organiser() -> None:
    refusal = book_of().refusal("allow-list", CARL)
    assert refusal is not None
    assert f"give the organiser its peer ID: {CARL}" in refusal


# ---------------------------------------------------------------- any history

peers = st.sampled_from([ANNA, BERT, CARL])
kinds = st.integers(0, 6)
uses = st.none() | st.integers(1, 3)
expiries = st.none() | st.floats(NOW, NOW + 100)
texts = st.text(max_size=5)


@st.composite
def histories(draw: st.DrawFn) -> list[AdmissionRecord]:
    """Records in a possible order: a token is created before it is used."""
    records: list[AdmissionRecord] = []
    made: dict[int, TokenCreated] = {}
    for _ in range(draw(st.integers(0, 15))):
        kind = draw(kinds)
        if kind == 0 or (kind in (1, 2) and not made):
            number = len(made) + 1
            made[number] = TokenCreated(
                number, hash_of(f"secret {number}"), draw(texts),
                draw(uses), draw(expiries),
            )  # fmt: skip
            records.append(made[number])
        elif kind == 1:
            records.append(TokenRevoked(draw(st.sampled_from(sorted(made)))))
        elif kind == 2:
            records.append(MemberAdmitted(draw(peers), draw(st.sampled_from(sorted(made)))))
        else:
            peer = draw(peers)
            records.append(
                (
                    PeerAllowed(peer), PeerDisallowed(peer), PeerBanned(peer, draw(texts)),
                    PeerUnbanned(peer),
                )[kind - 3]
            )  # fmt: skip
    return records


def last(records: list[AdmissionRecord], peer: PeerId, *kinds: type) -> AdmissionRecord | None:
    found = [r for r in records if isinstance(r, kinds) and getattr(r, "peer", None) == peer]
    return found[-1] if found else None


@given(histories(), peers, st.sampled_from(["open", "token", "allow-list"]))
def test_the_right_to_take_part_follows_from_the_last_record_on_each_peer(
    records: list[AdmissionRecord], peer: PeerId, mode
) -> None:
    revoked = {r.token for r in records if isinstance(r, TokenRevoked)}
    tokens = {r.token for r in records if isinstance(r, MemberAdmitted) and r.peer == peer}
    banned = isinstance(last(records, peer, PeerBanned, PeerUnbanned), PeerBanned)
    listed = isinstance(last(records, peer, PeerAllowed, PeerDisallowed), PeerAllowed)
    may = {"open": True, "token": bool(tokens - revoked), "allow-list": listed}[mode]
    book = AdmissionBook()
    for record in records:
        assert book.members("token") is not None  # they are kept from here on
        book.enter(record, NOW)
    assert (book.refusal(mode, peer) is None) == (may and not banned)
    if mode != "open":
        assert (peer in book.members(mode)) == (may and not banned)


@functools.cache
def an_empty_database() -> sqlite3.Connection:
    """A database to be copied: creating the tables takes longer than the rest of the test."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    create_schema(connection, Path("memory"))
    return connection


@given(histories())
def test_the_database_agrees_with_memory(records: list[AdmissionRecord]) -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    an_empty_database().backup(connection)
    book = AdmissionBook()
    for number, record in enumerate(records):
        insert_admission(connection, record, NOW + number)
        book.enter(record, NOW + number)
    read = read_admission(connection)
    connection.close()
    assert (read.tokens.keys(), read.bans.keys()) == (book.tokens.keys(), book.bans.keys())
    assert {p: b.reason for p, b in read.bans.items()} == {
        p: b.reason for p, b in book.bans.items()
    }
    assert read.allowed.keys() == book.allowed.keys()
    for number, made in book.tokens.items():
        stored = read.tokens[number]
        assert (stored.revoked_at is None) == (made.revoked_at is None)
        assert (stored.secret_sha256, stored.note, stored.uses, stored.expires_at) == (
            made.secret_sha256, made.note, made.uses, made.expires_at,
        )  # fmt: skip
        assert read.uses_left(stored) == book.uses_left(made)
    for peer in (ANNA, BERT, CARL):
        for mode in ("open", "token", "allow-list"):
            assert read.refusal(mode, peer) == book.refusal(mode, peer)


# ---------------------------------------------------------------- on disk


def test_what_was_decided_survives_the_coordinator(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    store = SqliteStore.open(path, lambda: NOW)

    async def main() -> None:
        for record in (
            token(1, "a long secret", uses=1, note="for Anna"), MemberAdmitted(ANNA, 1),
            PeerAllowed(BERT), PeerBanned(CARL, "cheats"),
        ):  # fmt: skip
            await store.write(record)

    trio.run(main)
    store.close()
    store = SqliteStore.open(path)
    book = store.read(read_admission)
    store.close()
    assert book.tokens[1].note == "for Anna"
    assert book.uses_left(book.tokens[1]) == 0
    assert book.allowed == {BERT: NOW}
    assert book.bans[CARL].reason == "cheats"
    kept = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert hash_of("a long secret").encode() in kept
    assert b"a long secret" not in kept


def test_a_second_ban_of_a_peer_replaces_the_first_and_both_stay_written(tmp_path: Path) -> None:
    connection = open_for_writing(tmp_path / "run.sqlite3")
    for number, reason in enumerate(("first", "second")):
        insert_admission(connection, PeerBanned(ANNA, reason), NOW + number)
    assert read_admission(connection).bans[ANNA].reason == "second"
    rows = connection.execute("SELECT reason, lifted_at FROM bans ORDER BY id").fetchall()
    connection.close()
    assert rows == [("first", NOW + 1), ("second", None)]


def test_those_seen_lately_are_those_that_can_have_a_certificate(tmp_path: Path) -> None:
    now = NOW
    store = SqliteStore.open(tmp_path / "run.sqlite3", lambda: now)

    async def main() -> None:
        nonlocal now
        await store.write(PeerSeen(ANNA))
        await store.write(PeerSeen(BERT))
        now += 100
        await store.write(PeerSeen(BERT))

    trio.run(main)
    assert store.read(lambda c: read_seen_since(c, NOW + 50)) == {BERT: NOW + 100}
    store.close()
    connection = sqlite3.connect(tmp_path / "run.sqlite3")
    assert read_seen_since(connection, 0.0) == {ANNA: NOW, BERT: NOW + 100}
    connection.close()
