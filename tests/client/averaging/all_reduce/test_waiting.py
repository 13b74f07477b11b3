"""Members that are alive and let a round wait: they are named, and no other one is."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest

from kits.averaging.memory_carrier import MemoryCarrier, MemoryChannel
from kits.averaging.memory_group import A, B, C, Group, run_on_virtual_time, with_network
from swarm_client.averaging.all_reduce import reduce
from swarm_client.averaging.all_reduce.attendance import REDUCER_FACTOR, STUCK_STALLS
from swarm_client.averaging.all_reduce.errors import RoundFailure
from swarm_client.averaging.all_reduce.frames import HEADER_BYTES, FrameKind, Header
from swarm_client.averaging.all_reduce.member_link import MemberLink
from swarm_shared.base.types import PeerId

STALL_SECONDS = 10.0
BEAT_SECONDS = 3.0


class HoldingLink(MemberLink):
    """A link of a member whose vector is all right; that of B holds the round up in one way."""

    way = ""
    of_b: list[HoldingLink]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_of_b = self._my_index == 1
        self._kind = FrameKind.ACCEPT
        if self._is_of_b:
            self.of_b.append(self)

    async def _write(self, data: bytes | memoryview) -> None:
        is_header = len(data) == HEADER_BYTES
        if is_header:
            self._kind = Header.decode(data).kind
        if not self._is_of_b:
            await super()._write(data)
        elif self._kind is FrameKind.ABORT:
            await anyio.sleep_forever()
        elif (self.way, self._kind) == ("keeps its sums", FrameKind.SUM):
            pass
        elif self.way == f"drips {self._kind.name}" and not is_header:
            for place in range(len(data)):
                await super()._write(data[place : place + 1])
                await anyio.sleep(BEAT_SECONDS)
        elif self.way == f"delays {self._kind.name}" and is_header:
            for _ in range(11):
                await anyio.sleep(BEAT_SECONDS)
                await super()._write(self._header(FrameKind.HEARTBEAT, 0))
            await super()._write(data)
        else:
            await super()._write(data)

    async def receive(self, kind: FrameKind, **expected: Any) -> Header:
        if self._is_of_b and self.way == f"reads no {kind.name}":
            await anyio.sleep_forever()
        return await super().receive(kind, **expected)


AS_MEMBER, AS_REDUCER = STUCK_STALLS * STALL_SECONDS, REDUCER_FACTOR * STUCK_STALLS * STALL_SECONDS


@pytest.mark.parametrize(
    ("way", "within_seconds"),
    [("drips PIECE", AS_MEMBER), ("delays PIECE", AS_MEMBER), ("reads no SUM", AS_MEMBER),
     ("drips SUM", AS_REDUCER), ("delays SUM", AS_REDUCER), ("reads no PIECE", AS_REDUCER),
     ("keeps its sums", AS_REDUCER)],
)  # fmt: skip
def test_a_member_that_lets_a_round_wait_while_it_is_alive_is_named_by_all(
    monkeypatch: pytest.MonkeyPatch, way: str, within_seconds: float
) -> None:
    monkeypatch.setattr(reduce, "MemberLink", HoldingLink)
    monkeypatch.setattr(HoldingLink, "way", way)
    monkeypatch.setattr(HoldingLink, "of_b", [], raising=False)
    group = Group((A, B, C), 60_000, codec="exact")
    ended: dict[PeerId, float] = {}

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        async def honest(name: PeerId) -> None:
            await group.member(group.spec(name), carriers[name], stall_seconds=STALL_SECONDS)
            ended[name] = anyio.current_time() - begun

        async def holder() -> None:
            await group.member(group.spec(B), carriers[B], stall_seconds=1e6)

        async def beat() -> None:
            while True:
                await anyio.sleep(BEAT_SECONDS)
                for link in HoldingLink.of_b:
                    link.queue_heartbeat()

        begun = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(holder)
            tasks.start_soon(beat)
            with anyio.move_on_after(20 * within_seconds):
                async with anyio.create_task_group() as others:
                    others.start_soon(honest, A)
                    others.start_soon(honest, C)
            tasks.cancel_scope.cancel()

    run_on_virtual_time(lambda: with_network(group.names, body))
    for name in (A, C):
        failure = group.failures[name]
        assert (failure.failure, failure.culprit) == (RoundFailure.STALLED, B)
        assert failure.aborted_by in (None, A, C)
        assert ended[name] < within_seconds + STALL_SECONDS


class SlowChannel(MemoryChannel):
    """20 kB/s in both directions."""

    async def send(self, data: bytes | memoryview) -> None:
        for start in range(0, len(data), 20_000):
            part = data[start : start + 20_000]
            await anyio.sleep(len(part) / 20_000)
            await super().send(part)


def test_a_slow_member_whose_data_comes_is_waited_for() -> None:
    """Longer than one is waited for whose data does not come."""
    group = Group((A, B, C), 600_000, codec="exact")
    took: list[float] = []

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        carriers[B].channel_type = SlowChannel
        begun = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for name in group.names:
                spec = group.spec(name, piece_elements=10_000)
                limited = partial(group.member, stall_seconds=2.0)
                tasks.start_soon(limited, spec, carriers[name])
        took.append(anyio.current_time() - begun)

    run_on_virtual_time(lambda: with_network(group.names, body))
    assert group.failures == {}
    assert group.results[A].tobytes() == group.in_order().tobytes()
    assert took[0] > REDUCER_FACTOR * STUCK_STALLS * 2.0
