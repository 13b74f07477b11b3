"""One link of an all-reduce: what its two readers, the round and the pump, leave to each other."""

from __future__ import annotations

import anyio
import trio
import trio.testing

from swarm_client.averaging.all_reduce.errors import RoundFailed, RoundFailure
from swarm_client.averaging.all_reduce.member_link import MemberLink
from swarm_client.averaging.all_reduce.plan import RoundSpec
from swarm_client.averaging.all_reduce.routes import Route
from swarm_shared.base.types import PeerId


class SilentChannel:
    """Nothing comes. As asyncio's streams, it is for one reader at a time."""

    route = Route.HOST

    def __init__(self) -> None:
        self.closed = anyio.Event()
        self._reading = False

    async def send(self, data: bytes | memoryview) -> None:
        await anyio.lowlevel.checkpoint()

    async def receive(self, max_bytes: int) -> bytes:
        assert not self._reading, "another task reads this stream already"
        self._reading = True
        try:
            await self.closed.wait()
        finally:
            self._reading = False
        return b""

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def abort(self) -> None:
        await anyio.lowlevel.checkpoint()


async def test_a_link_whose_pump_awaits_the_others_end_is_not_read_by_a_failing_round_too() -> None:
    """A round fails through one member while the goodbye to another one is under way."""
    me, other = PeerId("a"), PeerId("b")
    spec = RoundSpec("run/1/1/0", (me, other), me, 4)
    channel = SilentChannel()
    link = MemberLink(
        channel,
        other,
        spec,
        on_failure=lambda _: None,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.pump)
        link.finish(closes_last=True)
        await trio.testing.wait_all_tasks_blocked()
        link.abort(RoundFailed("a third one died", None, failure=RoundFailure.STOPPED))
        nursery.start_soon(link.drain)
        await trio.testing.wait_all_tasks_blocked()
        channel.closed.set()
