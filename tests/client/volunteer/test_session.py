"""The first exchange of a session, with a coordinator that answers what the test says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from kits.memory import offers
from swarm_client.volunteer.session import MAX_OUTBOX_BYTES, CoordinatorSession, attach
from swarm_shared.base.errors import FrameError, LinkClosed, VersionError
from swarm_shared.base.types import RunId
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.network import FramedStream, FrameLimits, open_node
from swarm_shared.protocol import CONTROL_PROTOCOL, Dropped, Hello, encode

RUN = RunId("ab" * 32)


async def attach_to_one_that_answers(answer: dict[str, object]) -> None:
    organiser = Identity.generate()

    async def handle(stream: FramedStream) -> None:
        await stream.receive()
        await stream.send(json.dumps(answer).encode())

    async with (
        open_node(organiser, ["/ip4/127.0.0.1/tcp/0"]) as coordinator,
        open_node(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"]) as node,
    ):
        coordinator.serve(CONTROL_PROTOCOL, handle, FrameLimits(), public=True)
        invite = Invite(
            coordinator=organiser.peer_id, addresses=coordinator.addresses[:1], run_id=RUN,
            organiser=organiser.peer_id,
        )  # fmt: skip
        hello = Hello(run=RUN, software="1", addresses=(), device="cpu", memory=offers(1))
        async with attach(node, invite, hello):
            raise AssertionError("it was admitted")


async def test_the_refusal_of_a_newer_coordinator_is_understood_although_it_says_more() -> None:
    refused = {"kind": "refused", "code": "version", "reason": "update it", "since": "2031"}
    with pytest.raises(VersionError, match=r"^update it$"):
        await attach_to_one_that_answers(refused)


@pytest.mark.parametrize(
    "answer", [{"kind": "refused", "code": "admission", "reason": "no", "since": "2031"}, {}]
)
async def test_no_other_message_of_a_newer_coordinator_is_guessed_at(
    answer: dict[str, object],
) -> None:
    with pytest.raises(FrameError, match="does not parse"):
        await attach_to_one_that_answers(answer)


async def test_a_coordinator_that_takes_nothing_does_not_fill_the_memory() -> None:
    class Stream:
        sent_bytes = 0

        async def send(self, header: bytes, timeout_seconds: float) -> None:
            await trio.lowlevel.checkpoint()
            self.sent_bytes += len(header)

    stream: Any = Stream()
    welcome: Any = None
    session = CoordinatorSession(stream, welcome)
    dropped = Dropped(step=1, stage=0, microbatches=(65_535,) * 65_536)
    for _ in range(2 * MAX_OUTBOX_BYTES // len(encode(dropped))):
        session.send(dropped)
    with pytest.raises(LinkClosed, match="takes too little"):
        await session.write_all()
    assert stream.sent_bytes < MAX_OUTBOX_BYTES + 2**20
