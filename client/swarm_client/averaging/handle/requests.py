"""Questions to the averaging worker, and who waits for which answer. trio."""

from __future__ import annotations

import trio

from swarm_client.averaging.all_reduce.errors import RoundFailed, RoundFailure
from swarm_client.averaging.all_reduce.routes import RouteFault, StreamTraffic
from swarm_client.averaging.protocol.messages import RoundFailureReport, WorkerMessage
from swarm_client.ipc.child_process import ChildProcess
from swarm_shared.base.errors import LinkClosed
from swarm_shared.base.frozen_model import FrozenModel

SEND_SECONDS = 5.0
"""The socket takes many messages before it is full; a worker that long behind is frozen."""

Key = str | int
"""A round's name, or the number of another request."""


class _Waiter:
    """One answer that somebody waits for."""

    def __init__(self) -> None:
        self._event = trio.Event()
        self._answer: WorkerMessage | None = None

    def answer(self, message: WorkerMessage | None) -> None:
        """None: the worker is gone."""
        self._answer = message
        self._event.set()

    async def wait(self) -> WorkerMessage | None:
        await self._event.wait()
        return self._answer


class Requests:
    """Of one daemon to its workers, one worker after the other."""

    def __init__(self) -> None:
        self._sending = trio.Lock()
        self._waiting: dict[Key, _Waiter] = {}
        self._next_number = 0

    def new_number(self) -> int:
        self._next_number += 1
        return self._next_number

    @property
    def has_rounds(self) -> bool:
        return any(isinstance(key, str) for key in self._waiting)

    async def ask(
        self, child: ChildProcess[WorkerMessage], key: Key, message: FrozenModel
    ) -> WorkerMessage:
        """The answer. LinkClosed when the worker dies first."""
        if key in self._waiting:
            raise RoundFailed(
                f"round {key} was started twice; each attempt needs its own name",
                failure=RoundFailure.STOPPED,
            )
        waiter = self._waiting[key] = _Waiter()
        try:
            await self.send(child, message)
            answer = await waiter.wait()
        finally:
            del self._waiting[key]
        if answer is None:
            raise LinkClosed("it has ended")
        return answer

    async def send(self, child: ChildProcess[WorkerMessage], message: FrozenModel) -> None:
        """One message at a time, and whole: half a message would be the last one understood."""
        async with self._sending:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + SEND_SECONDS):
                await child.link.send(message)
                return
        child.kill()
        raise LinkClosed("the averaging worker takes no messages any more")

    def answered(self, key: Key, message: WorkerMessage) -> None:
        waiter = self._waiting.get(key)
        if waiter is not None:  # nobody waits any more for what was called off
            waiter.answer(message)

    def worker_gone(self) -> None:
        for waiter in self._waiting.values():
            waiter.answer(None)


def round_failed(message: RoundFailureReport) -> RoundFailed:
    """The worker's word on a failed round as the error that it was."""
    failed = RoundFailed(
        message.reason,
        message.culprit,
        failure=message.failure,
        route=message.route,
    )
    failed.links = tuple(
        StreamTraffic(each.peer, each.route, each.bytes_sent, each.bytes_received)
        for each in message.carried
    )
    failed.faults = tuple(RouteFault(each.peer, each.route, each.reason) for each in message.faults)
    return failed
