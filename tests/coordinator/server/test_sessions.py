"""Broadcasts: in order for each session, and a few writers at a time."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kits.members import peer_record
from swarm_coordinator.server import sessions as module
from swarm_coordinator.server.sessions import WRITERS_PER_TURN, ClientSessions, MessageEncoder
from swarm_shared.base.types import MicrobatchIndex, PeerId, Step
from swarm_shared.protocol import (
    Close,
    Goodbye,
    Mask,
    PeerRecord,
    Reduction,
    Refused,
    Roster,
    coordinator_messages,
    encode,
    parse,
)


class Stream:
    def __init__(self) -> None:
        self.sent: list[bytes] = []

    async def send(self, header: bytes, timeout_seconds: float) -> None:
        await trio.lowlevel.checkpoint()
        self.sent.append(header)

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()


async def test_a_broadcast_reaches_all_peers_before_what_is_sent_after_it() -> None:
    sessions = ClientSessions()
    peers = [PeerId(f"peer-{number}") for number in range(3 * WRITERS_PER_TURN)]
    streams = {peer: Stream() for peer in peers}
    opened = []
    for peer in peers:
        session = sessions.open(peer, streams[peer])  # type: ignore[arg-type]
        sessions.make_current(session.number, peer)
        opened.append(session)
    async with trio.open_nursery() as nursery:
        for session in opened:
            nursery.start_soon(session.write_all)
        nursery.start_soon(sessions.wake_writers)
        await trio.testing.wait_all_tasks_blocked()
        sessions.broadcast([*peers, PeerId("nobody")], Goodbye(reason="to all"))
        mask = Mask(request=1, accumulate=())
        sessions.send(peers[-1], mask)
        await trio.testing.wait_all_tasks_blocked()
        kinds = {peer: [b"goodbye" in header for header in s.sent] for peer, s in streams.items()}
        assert kinds.pop(peers[-1]) == [True, False]
        assert all(seen == [True] for seen in kinds.values())
        await sessions.finish_all(5.0)
        nursery.cancel_scope.cancel()


async def test_what_was_broadcast_is_written_before_a_session_ends() -> None:
    sessions, stream = ClientSessions(), Stream()
    session = sessions.open(PeerId("a"), stream)  # type: ignore[arg-type]
    sessions.make_current(session.number, PeerId("a"))
    sessions.broadcast([PeerId("a")], Goodbye(reason="to all"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.write_all)
        await sessions.finish_all(5.0)
    assert len(stream.sent) == 1


@pytest.mark.parametrize("is_alive", [True, False])
@pytest.mark.parametrize(("older", "newer"), [("a" * 16, "a" * 16), ("a" * 16, "b" * 16)])
async def test_a_new_session_ends_the_older_one_for_good_if_it_is_of_another_program(
    older: str, newer: str, is_alive: bool
) -> None:
    sessions, streams = ClientSessions(), (Stream(), Stream())
    first, second = (
        sessions.open(PeerId("a"), stream, 0.0, instance)  # type: ignore[arg-type]
        for stream, instance in zip(streams, (older, newer), strict=True)
    )
    sessions.make_current(first.number, PeerId("a"))
    if not is_alive:
        sessions.ended(second)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first.write_all)
        sessions.make_current(second.number, PeerId("a"))
        sessions.send(PeerId("a"), Goodbye(reason="to the newer one"))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert first.scope.cancel_called
    assert sessions.attached == (1 if is_alive else 0)
    refused = [parse(coordinator_messages, header) for header in streams[0].sent]
    if older == newer or not is_alive:
        assert refused == []
        return
    (refusal,) = refused
    assert isinstance(refusal, Refused)
    assert refusal.code == "admission"
    assert "remove identity.key from the copy" in refusal.reason


async def test_a_large_roster_is_encoded_a_little_at_a_time_and_once_for_all_newcomers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RECORDS_PER_TURN", 2)
    rosters = [
        Roster(
            serial=serial,
            peers=tuple(
                peer_record(f"peer-{number}", microbatches_per_second=serial * number)
                for number in range(7)
            ),
        )
        for serial in (1, 2)
    ]  # fmt: skip
    sessions, streams = ClientSessions(), [Stream(), Stream()]
    async with trio.open_nursery() as nursery:
        for number, stream in enumerate(streams):
            peer = PeerId(f"peer-{number}")
            session = sessions.open(peer, stream)  # type: ignore[arg-type]
            sessions.make_current(session.number, peer)
            nursery.start_soon(session.write_all)
        nursery.start_soon(sessions.wake_writers)
        for roster in rosters:
            for number in range(2):
                sessions.send(PeerId(f"peer-{number}"), roster)
            sessions.broadcast([PeerId("peer-0")], Goodbye(reason="what came after it"))
        await sessions.finish_all(5.0)
        nursery.cancel_scope.cancel()
    first, second = (encode(roster) for roster in rosters)
    goodbye = encode(Goodbye(reason="what came after it"))
    assert streams[0].sent == [first, goodbye, second, goodbye]
    assert streams[1].sent == [first, second]
    assert streams[0].sent[0] is streams[1].sent[0], "the work was shared"


def test_a_roster_is_encoded_in_parts_as_it_would_be_whole() -> None:
    def record(peer: str, rate: float = 1.0) -> PeerRecord:
        addresses = ("/ip4/192.0.2.1/tcp/1",)
        return peer_record(peer, addresses=addresses, microbatches_per_second=rate)

    encoder = MessageEncoder()
    first, second, other = record("a"), record('quoted "b"'), record("a", 2.0)
    for number, peers in enumerate(((), (first,), (first, second), (second, other))):
        roster = Roster(serial=number, peers=peers, revoked=("x", "y")[:number])
        assert encoder.encode(roster) == encode(roster)


def test_a_close_is_encoded_in_parts_as_it_would_be_whole() -> None:
    def reductions(*members: str) -> tuple[Reduction, ...]:
        return (Reduction(part="own", members=tuple(PeerId(member) for member in members)),)

    encoder = MessageEncoder()
    first, second = reductions("a", 'quoted "b"'), reductions("c")
    for attempt, group, committed, moving in (
        (1, first, (), ()), (1, second, (3, 14), ()), (1, first, (5,), ()),
        (2, second, (), ()), (2, second, (7,), first), (2, first, (0, 9), ()),
    ):  # fmt: skip
        close = Close(
            step=Step(4), attempt=attempt, reductions=group, moving=moving,
            committed=tuple(MicrobatchIndex(one) for one in committed),
        )  # fmt: skip
        assert encoder.encode_close(close) == encode(close)
