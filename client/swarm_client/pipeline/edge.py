"""One edge: a long-lived stream to one peer of the next stage, with many requests in flight.

Requests go down, answers come up, matched by number. The receiver grants credits when the edge
opens; a request holds one until its answer arrives, so the receiver's queue and memory are bounded
by what it granted (OneFlow's registers as credits, arXiv 2110.15032).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import trio

from swarm_client.pipeline.local_stream import LocalStream
from swarm_shared.base.errors import LinkClosed, ProtocolError, SwarmError
from swarm_shared.base.types import PeerId
from swarm_shared.network import FramedStream
from swarm_shared.protocol import (
    Backward,
    Forward,
    RefusalReason,
    StageCancel,
    StageHello,
    StageHelloAnswer,
    StageRefused,
    encode,
    parse,
    stage_answers,
)
from swarm_shared.protocol.framing import Buffer

HELLO_SECONDS = 10.0
"""Timeout of the answer to a stage hello."""

Stream = FramedStream | LocalStream


class EdgeRefused(SwarmError):
    """The receiver refused; `reason` shows whether another peer may serve."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason
        self.detail = detail


@dataclass(slots=True, eq=False)
class EdgeAnswer:
    """The gradient of what was sent (empty for a trainer), with its header."""

    header: Backward
    payload: Buffer


class Edge:
    """Made by `open_edge`; `run` must be running while it is used."""

    def __init__(self, stream: Stream, hello: StageHelloAnswer) -> None:
        self.peer: PeerId = stream.remote
        self.closed = False
        self._stream = stream
        self.credits = hello.credits
        """Requests at a time that the receiver granted."""
        self._numbers = itertools.count(1)
        self._pending: dict[int, trio.MemorySendChannel[EdgeAnswer | SwarmError]] = {}
        self._answered = trio.lowlevel.ParkingLot()
        """`finish`, which waits for the requests in flight."""

    @property
    def superseded(self) -> bool:
        """Whether there is a better link to this peer than the one that this edge uses."""
        return self._stream.superseded

    async def finish(self) -> None:
        """Close the edge once every request in flight has been answered."""
        # After it the requests that were started a moment ago are in flight, too.
        await trio.lowlevel.checkpoint()
        while self._pending and not self.closed:
            await self._answered.park()
        self.fail(LinkClosed(f"the link to {self.peer} was replaced by a better one"))
        await self._stream.close()

    async def request(self, header: Forward, parts: Sequence[Buffer]) -> EdgeAnswer:
        """Send one microbatch and wait for its gradient. The caller keeps to `credits`.

        `header.request` is replaced by this edge's own number. Raises EdgeRefused, LinkClosed or
        ProtocolError; when cancelled, sends a cancellation to the receiver.
        """
        if self.closed:
            raise LinkClosed(f"the link to {self.peer} is closed")
        number = next(self._numbers)
        self._pending[number], results = trio.open_memory_channel[EdgeAnswer | SwarmError](1)
        try:
            await self._stream.send(
                encode(header.model_copy(update={"request": number})), tuple(parts)
            )
            result = await results.receive()
        except trio.Cancelled:
            with trio.CancelScope(shield=True), trio.move_on_after(1.0):
                await self._cancel_at_receiver(number)
            raise
        finally:
            self._pending.pop(number, None)
            self._answered.unpark_all()
        if isinstance(result, SwarmError):
            raise result
        return result

    async def _cancel_at_receiver(self, number: int) -> None:
        with suppress(LinkClosed):
            if not self.closed:
                await self._stream.send(encode(StageCancel(request=number)))

    async def run(self) -> str:
        """Receive answers until the link ends; then fail all pending requests, and return the
        reason."""
        error: SwarmError = LinkClosed(f"the link to {self.peer} ended")
        try:
            while True:
                frame = await self._stream.receive()
                self._deliver(parse(stage_answers, frame.header), frame.payload)
                del frame  # or its payload would stay until the next one comes
        except (LinkClosed, ProtocolError, EdgeRefused) as reason:
            error = reason
        finally:
            self.fail(error)
            with trio.CancelScope(shield=True):
                await self._stream.reset()
        return str(error)

    def _deliver(
        self, message: StageHelloAnswer | StageRefused | Backward, payload: Buffer
    ) -> None:
        if isinstance(message, StageHelloAnswer):
            raise ProtocolError(f"{self.peer} sent a second hello")
        if message.request is None:
            raise EdgeRefused(RefusalReason.NOT_ADMITTED, "the link was closed by its receiver")
        pending = self._pending.get(message.request)
        if pending is None:
            return  # cancelled meanwhile
        with suppress(trio.WouldBlock):  # it has its result already
            pending.send_nowait(
                EdgeRefused(message.reason, message.detail)
                if isinstance(message, StageRefused)
                else EdgeAnswer(message, payload)
            )

    def fail(self, error: SwarmError) -> None:
        """Close the edge; every request in flight raises `error`."""
        self.closed = True
        self._answered.unpark_all()
        for pending in self._pending.values():
            with suppress(trio.WouldBlock):
                pending.send_nowait(error)


async def open_edge(stream: Stream, hello: StageHello) -> Edge:
    """Send the hello on a fresh stream; return the edge. EdgeRefused with the receiver's reason."""
    await stream.send(encode(hello))
    frame = await stream.receive(timeout_seconds=HELLO_SECONDS)
    answer = parse(stage_answers, frame.header)
    if isinstance(answer, StageRefused):
        raise EdgeRefused(answer.reason, answer.detail)
    if not isinstance(answer, StageHelloAnswer):
        raise ProtocolError(f"{stream.remote} answered the hello with {answer.kind!r}")
    return Edge(stream, answer)
