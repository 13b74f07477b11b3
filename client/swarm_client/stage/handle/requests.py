"""Requests to one compute process: who waits for which answer, what they see when it dies. trio.

Knows nothing of what is computed. Answers come in any order; `WorkerDied` comes at once, to every
caller there is and to all that come later.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from swarm_client.ipc.child_process import ChildProcess
from swarm_client.stage.handle.liveness import Liveness, Outstanding
from swarm_client.stage.protocol import messages
from swarm_client.stage.protocol.errors import RequestFailed, WorkerDied
from swarm_shared.base.errors import FrameError, LinkClosed

EXIT_STATUS_SECONDS = 2.0
"""How long callers wait for the exit status of a worker whose socket has ended."""

_PATIENT = (
    messages.ConfigureStage,
    messages.SaveStageState,
    messages.LoadStageState,
    messages.ReinitialiseStage,
)

AnswerT = TypeVar("AnswerT", bound=messages.Numbered)


@dataclass(slots=True, eq=False)
class _Waiter:
    """One unanswered request. The reader abandons it when the caller has left."""

    event: trio.Event = field(default_factory=trio.Event)
    answer: messages.WorkerAnswer | None = None
    on_abandoned: Callable[[], None] | None = None
    abandoned: bool = False
    patient: bool = False
    """What it waits for takes as long as it takes."""
    behind: int | None = None
    """Of a patient one: with this many answers given, the worker was still busy with others."""


class Exchange:
    """`send_all`, `receive_all` and `watch` run beside the callers while the process lives."""

    def __init__(
        self, child: ChildProcess[messages.WorkerAnswer], name: str, on_death: Callable[[], None]
    ) -> None:
        self._child = child
        self._name = name
        self._on_death = on_death
        self._waiters: dict[int, _Waiter] = {}
        # Unbounded, and yet bounded: by the slots, and by callers who await each control answer.
        self._outbox, self._outbox_reader = trio.open_memory_channel[messages.Numbered](math.inf)
        self._liveness = Liveness()
        self._hung = ""
        self._death: str | None = None
        self._dead = trio.Event()

    async def wait_died(self) -> WorkerDied:
        """Return when the worker has ended, with the error that callers get."""
        await self._dead.wait()
        return self.died()

    def died(self) -> WorkerDied:
        """A new exception for each caller: a shared one would collect all their tracebacks."""
        assert self._death is not None
        return WorkerDied(self._death)

    def post(self, message: messages.Numbered) -> None:
        # After a death there is nobody to tell, and nothing left to free.
        with suppress(trio.ClosedResourceError, trio.BrokenResourceError):
            self._outbox.send_nowait(message)

    async def call(self, request: messages.Numbered, expected: type[AnswerT]) -> AnswerT:
        """The answer, which may take as long as what is asked for does."""
        answer = await self._exchange(request, _Waiter(patient=isinstance(request, _PATIENT)))
        if not isinstance(answer, expected):
            raise FrameError(
                f"the stage worker answered {answer.kind!r} where {expected.__name__} was due; "
                "please report this as a bug"
            )
        return answer

    async def compute(
        self, request: messages.Numbered, on_abandoned: Callable[[], None]
    ) -> messages.WorkerAnswer:
        """The answer to a computation. `on_abandoned` gives back what belongs to the request, as
        soon as the worker does not use it any more, where the caller gets no answer."""
        return await self._exchange(request, _Waiter(on_abandoned=on_abandoned))

    async def _exchange(self, request: messages.Numbered, waiter: _Waiter) -> messages.WorkerAnswer:
        if self._death is not None:
            raise self.died()
        if self._waiters:
            waiter.behind = self._liveness.answers
        self._waiters[request.request] = waiter
        self.post(request)
        try:
            await waiter.event.wait()
        except trio.Cancelled:
            if waiter.on_abandoned is not None:
                self.post(messages.Discard(request=request.request))
                if waiter.answer is not None or self._death is not None:
                    waiter.on_abandoned()
            waiter.abandoned = True
            raise
        if waiter.answer is None:
            raise self.died()
        if isinstance(waiter.answer, messages.Failed):
            if waiter.on_abandoned is not None:
                waiter.on_abandoned()
            raise RequestFailed(waiter.answer.code, waiter.answer.message)
        return waiter.answer

    async def send_all(self) -> None:
        with suppress(LinkClosed):  # the reader sees the end too, and reports it
            async for message in self._outbox_reader:
                await self._child.link.send(message)

    async def receive_all(self) -> None:
        reason = ""
        try:
            while (answer := await self._child.link.receive()) is not None:
                computed = None
                if isinstance(answer, messages.ForwardDone | messages.BackwardDone):
                    computed = answer.seconds
                self._liveness.answered(computed)
                waiter = self._waiters.pop(answer.request, None)
                if waiter is None:
                    continue
                waiter.answer = answer
                waiter.event.set()
                if waiter.abandoned and waiter.on_abandoned is not None:
                    waiter.on_abandoned()
        except FrameError as error:
            reason = f" ({error})"
            self._child.kill()
        status: int | None = None
        with trio.move_on_after(EXIT_STATUS_SECONDS):
            status = await self._child.wait()
        self._child.kill()  # harmless if it is dead, as it should be: its socket has ended
        self._fail_everybody(status, reason)

    async def watch(self) -> None:
        silent_seconds = await self._liveness.wait_hung(self._owes)
        self._hung = f": it was ended after it had answered nothing for {silent_seconds:.0f} s"
        self._child.kill()

    def _owes(self) -> Outstanding:
        answers = self._liveness.answers
        if any(w.patient and w.behind != answers for w in self._waiters.values()):
            return Outstanding.STORAGE
        return Outstanding.COMPUTING if self._waiters else Outstanding.NOTHING

    def _fail_everybody(self, status: int | None, reason: str) -> None:
        how = "" if status is None else f" with exit status {status}"
        how = self._hung or how
        self._death = f"{self._name} has ended{how}{reason}; its log is {self._child.log_path}"
        self._dead.set()
        self._outbox.close()
        self._on_death()
        for waiter in self._waiters.values():
            waiter.event.set()
        self._waiters.clear()
