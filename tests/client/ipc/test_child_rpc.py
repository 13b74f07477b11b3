"""ChildRpc with a child that the test plays itself."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import pytest
import trio
import trio.testing
from pydantic import Field, TypeAdapter

from swarm_client.ipc.child_process import ChildProcess, TrioLink
from swarm_client.ipc.child_rpc import ChildRpc
from swarm_client.ipc.numbered import Failure, Numbered, WorkerDied
from swarm_shared.base.errors import FrameError


class Ask(Numbered):
    kind: Literal["ask"] = "ask"
    text: str = ""


class Drop(Numbered):
    kind: Literal["drop"] = "drop"


class Reply(Numbered):
    kind: Literal["reply"] = "reply"
    text: str = ""


class Other(Numbered):
    kind: Literal["other"] = "other"


class Refused(Failure):
    kind: Literal["refused"] = "refused"

    def error(self) -> KeyError:
        return KeyError("refused")


Request = Annotated[Ask | Drop, Field(discriminator="kind")]
Answer = Annotated[Reply | Other | Refused, Field(discriminator="kind")]
requests: TypeAdapter[Ask | Drop] = TypeAdapter(Request)
answers: TypeAdapter[Reply | Other | Refused] = TypeAdapter(Answer)


class FakeProcess:
    """What ChildRpc uses of a process: it dies when the test closes its link or it is killed."""

    def __init__(self, link: TrioLink[Any]) -> None:
        self.link = link
        self.log_path = Path("child.log")
        self.kills = 0

    async def wait(self) -> int:
        return -9

    def kill(self) -> None:
        self.kills += 1


class Rig:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.process = FakeProcess(TrioLink(ours, answers))
        self.child: TrioLink[Ask | Drop] = TrioLink(theirs, requests)
        self.rpc: ChildRpc[Reply | Other | Refused] = ChildRpc(
            cast("ChildProcess[Reply | Other | Refused]", self.process), "the child"
        )

    async def receive_all(self) -> None:
        while await self.rpc.receive() is not None:
            pass

    async def read(self) -> Ask | Drop:
        message = await self.child.receive()
        assert message is not None
        return message


@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.rpc.send_all)
        nursery.start_soon(made.receive_all)
        yield made
        nursery.cancel_scope.cancel()


async def test_answers_in_any_order_reach_their_callers() -> None:
    found: dict[str, str] = {}
    async with rig() as r:

        async def ask(text: str) -> None:
            found[text] = (await r.rpc.call(Ask(text=text), Reply)).text

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "a")
            nursery.start_soon(ask, "b")
            asked = [await r.read(), await r.read()]
            assert len(r.rpc.pending) == 2
            for message in reversed(asked):
                assert isinstance(message, Ask)
                await r.child.send(Reply(request=message.request, text=message.text.upper()))
        assert found == {"a": "A", "b": "B"}
        assert (len(r.rpc.pending), r.rpc.received) == (0, 2)


async def test_a_failure_raises_its_error_and_a_wrong_answer_is_a_bug() -> None:
    async with rig() as r:
        freed: list[str] = []
        for answer, error in ((Refused, KeyError), (Other, FrameError)):
            async with trio.open_nursery() as nursery:

                async def reply(kind: type[Numbered] = answer) -> None:
                    await r.child.send(kind(request=(await r.read()).request))

                nursery.start_soon(reply)
                with pytest.raises(error):
                    await r.rpc.call(Ask(), Reply, on_abandoned=lambda: freed.append("slot"))
        assert freed == ["slot", "slot"]


async def test_a_cancelled_call_is_reported_and_its_resources_wait_for_the_answer() -> None:
    async with rig() as r:
        freed: list[str] = []
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def ask() -> None:
                    await r.rpc.call(
                        Ask(), Reply, on_cancel=Drop, on_abandoned=lambda: freed.append("slot")
                    )

                nursery.start_soon(ask)
                asked = await r.read()
                scope.cancel()
        dropped = await r.read()
        assert isinstance(dropped, Drop)
        assert dropped.request == asked.request
        assert (freed, len(r.rpc.pending)) == ([], 1)
        await r.child.send(Reply(request=asked.request))
        await trio.testing.wait_all_tasks_blocked()
        assert (freed, len(r.rpc.pending)) == (["slot"], 0)


async def test_the_childs_end_fails_all_callers_those_to_come_and_names_its_cause() -> None:
    async with rig() as r:

        async def ask() -> None:
            with pytest.raises(WorkerDied, match="the child has ended: it hung; its log is child"):
                await r.rpc.call(Ask(), Reply)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
            await r.read()
            await r.read()
            r.rpc.kill("it hung")
            await r.child.aclose()
        await ask()
        assert "it hung" in str(await r.rpc.wait_died())
        r.rpc.post(Ask())  # dropped
        assert len(r.rpc.pending) == 2


async def test_a_damaged_frame_ends_the_child() -> None:
    async with rig() as r:
        await r.child._stream.send_all(b"\xff\xff\xff\xff")
        assert "exit status -9 (a message of" in str(await r.rpc.wait_died())
        assert r.process.kills >= 1


async def test_an_owner_that_stops_receiving_fails_its_callers() -> None:
    async with rig() as r:

        async def ask() -> None:
            with pytest.raises(WorkerDied):
                await r.rpc.call(Ask(), Reply)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await r.read()
            r.rpc.close()
            r.rpc.close()


async def test_a_child_that_takes_no_messages_is_killed() -> None:
    made = Rig()
    made.rpc._send_seconds = 0.05
    for _ in range(40):
        made.rpc.post(Ask(text="x" * 60_000))
    await made.rpc.send_all()
    assert made.process.kills == 1
