"""Requests to a child process and their answers (trio).

Owns request numbers, the queue of outgoing messages, the callers that wait for an answer, and what
these callers get when the child ends. Does not own the content of messages, the rule by which a
silent child counts as hung, nor restarting: the owner of the child calls `receive` in a loop, uses
what it returns, and calls `kill` when the child has hung.

Answers arrive in any order. When the child ends, every waiting caller gets `WorkerDied`, and so
does every later one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import trio

from swarm_client.ipc.child_process import ChildProcess
from swarm_client.ipc.numbered import Failure, Numbered, WorkerDied
from swarm_shared.base.errors import FrameError, LinkClosed

EXIT_STATUS_SECONDS = 2.0
"""Seconds that callers wait for the exit status of a child whose socket has ended."""

MessageT = TypeVar("MessageT", bound=Numbered)
AnswerT = TypeVar("AnswerT", bound=Numbered)


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request without an answer. It stays pending after its caller was cancelled, until the
    child answers or ends."""

    message: Numbered
    queued_behind: int | None
    """Number of messages received when it was sent while other requests were pending; None if the
    child was idle."""
    on_abandoned: Callable[[], None] | None
    event: trio.Event = field(default_factory=trio.Event)
    answer: Numbered | None = None
    abandoned: bool = False


class ChildRpc(Generic[MessageT]):
    """The requests to one child process. `send_all` and a loop of `receive` run beside callers."""

    def __init__(
        self, child: ChildProcess[MessageT], name: str, *, send_seconds: float = math.inf
    ) -> None:
        """`name` begins error messages. A child that does not take a message within `send_seconds`
        is killed."""
        self.received = 0
        """Number of messages received so far."""
        self.answered: set[type[Numbered]] = set()
        """Types of the requests of which at least one was answered."""
        self._child = child
        self._name = name
        self._send_seconds = send_seconds
        self._numbers = itertools.count(1)
        self._pending: dict[int, PendingRequest] = {}
        # Unbounded: callers await each answer, and payload slots bound the computations.
        self._outbox, self._outbox_reader = trio.open_memory_channel[Numbered](math.inf)
        self._kill_reason = ""
        self._death: str | None = None
        self._dead = trio.Event()

    @property
    def pending(self) -> Collection[PendingRequest]:
        """Unanswered requests, oldest first. After the child's end: those it left unanswered."""
        return self._pending.values()

    async def wait_died(self) -> WorkerDied:
        """Wait for the child's end and return the error that callers get."""
        await self._dead.wait()
        return self.died()

    def died(self) -> WorkerDied:
        """A new exception for each caller: a shared one would collect all their tracebacks."""
        assert self._death is not None
        return WorkerDied(self._death)

    def kill(self, reason: str) -> None:
        """Kill the child; `reason` is added to the error that callers get."""
        self._kill_reason = reason
        self._child.kill()

    def post(self, message: Numbered) -> None:
        """Send a message whose answer, if any, no caller waits for. Dropped after the child's end.

        The message keeps its number, so that it can name an earlier request.
        """
        with suppress(trio.ClosedResourceError, trio.BrokenResourceError):
            self._outbox.send_nowait(message)

    async def call(
        self,
        request: Numbered,
        expected: type[AnswerT],
        *,
        on_cancel: type[Numbered] | None = None,
        on_abandoned: Callable[[], None] | None = None,
    ) -> AnswerT:
        """Send a request and return its answer. Raises WorkerDied, or the error of a Failure.

        When the caller is cancelled, an `on_cancel` message with the request's number is sent.
        `on_abandoned` releases the caller's resources where the caller gets no answer, as soon as
        the child does not use them any more.
        """
        if self._death is not None:
            raise self.died()
        number = next(self._numbers)
        behind = self.received if self._pending else None
        pending = self._pending[number] = PendingRequest(request, behind, on_abandoned)
        self.post(request.numbered(number))
        try:
            await pending.event.wait()
        except trio.Cancelled:
            if on_cancel is not None:
                self.post(on_cancel(request=number))
            if on_abandoned is not None and (pending.answer is not None or self._dead.is_set()):
                on_abandoned()
            pending.abandoned = True
            raise
        answer = pending.answer
        if answer is None:
            raise self.died()
        if isinstance(answer, expected):
            return answer
        if on_abandoned is not None:
            on_abandoned()
        if isinstance(answer, Failure):
            raise answer.error()
        raise FrameError(
            f"{self._name} answered {type(answer).__name__} where {expected.__name__} was due; "
            "please report this as a bug"
        )

    async def send_all(self) -> None:
        """Send what is posted until the child ends."""
        with suppress(LinkClosed):  # `receive` reports the end
            async for message in self._outbox_reader:
                with trio.move_on_after(self._send_seconds) as sending:
                    await self._child.link.send(message)
                if sending.cancelled_caught:
                    self.kill("it takes no messages any more")
                    return

    async def receive(self) -> MessageT | None:
        """Hand the next message to the caller that waits for it, and return it.

        None when the child has ended; it is dead then, and all callers have been woken.
        """
        reason = ""
        try:
            message = await self._child.link.receive()
            if message is not None:
                self.received += 1
                self._deliver(message)
                return message
        except FrameError as error:
            reason = f" ({error})"
            self._child.kill()
        status: int | None = None
        with trio.move_on_after(EXIT_STATUS_SECONDS):
            status = await self._child.wait()
        self._child.kill()  # harmless if it is dead, as it should be: its socket has ended
        self._fail_all(status, reason)
        return None

    def close(self) -> None:
        """Fail all callers, where the owner stops receiving before the child has ended."""
        if not self._dead.is_set():
            self._fail_all(None, "")

    def _deliver(self, answer: Numbered) -> None:
        pending = self._pending.pop(answer.request, None)
        if pending is None:
            return
        self.answered.add(type(pending.message))
        pending.answer = answer
        pending.event.set()
        if pending.abandoned and pending.on_abandoned is not None:
            pending.on_abandoned()

    def _fail_all(self, status: int | None, reason: str) -> None:
        manner = "" if status is None else f" with exit status {status}"
        if self._kill_reason:
            manner = f": {self._kill_reason}"
        self._death = f"{self._name} has ended{manner}{reason}; its log is {self._child.log_path}"
        self._dead.set()
        self._outbox.close()
        for pending in self._pending.values():
            pending.event.set()
