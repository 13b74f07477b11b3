"""Attachment to the coordinator: one session after the other, until the run is finished or left.

Owns the current session or the reason why there is none, the back-off between two sessions, and the
order of a leave. The content of a session is the volunteer's.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from swarm_client.volunteer.session import (
    CoordinatorSession,
    RefusedForNow,
    attach,
    root_error,
)
from swarm_shared.base.backoff import Backoff, with_jitter
from swarm_shared.base.errors import (
    AdmissionError,
    CapacityError,
    MachineError,
    NetworkError,
    ProtocolError,
    SwarmError,
    VersionError,
)
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.text import duration_text
from swarm_shared.base.types import Instance
from swarm_shared.identity.invite import Invite
from swarm_shared.network import Node
from swarm_shared.protocol import (
    Goodbye,
    Hello,
    Leaving,
    Receipts,
    Welcome,
)
from swarm_shared.run.manifest import LimitsConfig

if TYPE_CHECKING:
    from swarm_client.volunteer.volunteer import Volunteer

FIRST_BACKOFF_SECONDS = 0.5
"""First pause before a new attempt; doubled with each failure."""
GOODBYE_SECONDS = 60.0
"""Longest wait for the coordinator to agree that this volunteer leaves until it is resumed; then
the session is ended without that, and a paused machine's memory is its user's."""
MAXIMUM_BACKOFF_SECONDS = 7.0
"""Longest pause between attempts. With 20 % jitter a coordinator that returns is found
within 10 s."""
REPORT_SECONDS = 600.0
"""Interval of reports of an absence whose reason stays the same. Attempts are not reported."""


def heartbeat_seconds(welcome: Welcome, limits: LimitsConfig) -> float:
    """Return the interval of heartbeats in a session: a welcome can lengthen the manifest's, whose
    bounds the volunteer has checked, and cannot shorten it."""
    return max(limits.heartbeat_seconds, welcome.heartbeat_seconds or 0.0)


class AbsenceReports:
    """The lines for people during one absence of the coordinator. What is tried again for ever says
    how to end that: a run that has ended may have no coordinator left to say so."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._reason = ""
        self._due_at = 0.0

    def line(self, reason: str, now: float) -> str | None:
        """The line that is due after a failed attempt, if one is."""
        if self._since is None:
            self._since = now
        elif reason == self._reason and now < self._due_at:
            return None
        self._reason, self._due_at = reason, now + REPORT_SECONDS
        seconds = now - self._since
        if seconds < REPORT_SECONDS:
            return f"no connection to the coordinator{reason}; trying again every few seconds"
        return (
            f"no connection to the coordinator for {duration_text(seconds)}{reason}; trying again "
            "every few seconds; if the run has ended, `swarm-client leave` ends this"
        )


class Attachment:
    """The sessions of one volunteer, of which `run` opens one after another."""

    def __init__(self, node: Node, invite: Invite, report: Callable[[str], None]) -> None:
        self.session: CoordinatorSession | None = None
        self.problem: SwarmError | None = None
        """The reason why there is no session; None once one has been opened."""
        self.finished = False
        self.leaving = False
        self._leaving_until_resumed = False
        """The stage is given up, and one asked for again: after a long pause, or at once where the
        memory does not suffice."""
        self._self_tested = False
        """This machine has passed a self-test since the last answer of the coordinator."""
        self._node = node
        self._invite = invite
        self._instance: Instance = secrets.token_hex(8)
        self._report = report
        self._absence = AbsenceReports()
        self._scope: trio.CancelScope | None = None
        self._attempt: trio.CancelScope | None = None
        """The scope around a session and the attempt to open it."""
        self._attach_now = trio.Event()
        self._awake = trio.Event()
        """Set unless the machine sleeps (`fall_asleep` to `wake`); no session is opened while it is
        not."""
        self._awake.set()
        self._session_closed = trio.Event()
        """Set when the present session, or the attempt to open one, has ended on the wire."""
        self._session_closed.set()

    @property
    def attached(self) -> bool:
        """Whether there is a session with the coordinator."""
        return self.session is not None

    def send(self, message: FrozenModel) -> bool:
        """Send to the coordinator; False while there is no session."""
        if self.session is not None:
            self.session.send(message)
        return self.session is not None

    def leave(self) -> None:
        """Ask to leave; ends when the coordinator agrees."""
        self.leaving = True
        self.send(Leaving())
        self.wake()

    def leave_until_resumed(self) -> None:
        """Leave in order, and attach again when there is a reason to."""
        self._leaving_until_resumed = True
        self.send(Leaving())
        self._bound_leaving()
        self._attach_now.set()

    def _bound_leaving(self) -> None:
        """End the present session in time, whatever the coordinator does."""
        if self._scope is not None and self._leaving_until_resumed:
            self._scope.deadline = trio.current_time() + GOODBYE_SECONDS

    async def fall_asleep(self, seconds: float) -> None:
        """Ask to leave, and end the session when the coordinator agrees or `seconds` are over: it
        notices a closed session at once and a sleeping machine only by its silence. No other one is
        opened until `wake`."""
        self._awake = trio.Event()
        self.send(Leaving())
        with trio.move_on_after(seconds):
            await self._session_closed.wait()
            return
        if self._attempt is not None:
            self._attempt.cancel()
        await self._session_closed.wait()

    def wake(self) -> None:
        """End a sleep, and a back-off that was due before it."""
        self._awake.set()
        self._attach_now.set()

    def restart(self) -> None:
        """End this session and attach again."""
        if self._scope is not None:
            self._scope.cancel()

    def network_changed(self) -> None:
        """The machine has changed network or woken up: a back-off that was due to the old network
        ends."""
        self._report("this machine's network has changed")
        self._attach_now.set()

    def explain(self, problem: SwarmError) -> str:
        """The problem as text for people, without the coordinator's peer ID."""
        return str(problem).replace(str(self._invite.coordinator), "it")

    async def run(self, volunteer: Volunteer) -> None:
        """Attach, and attach again after each loss of the coordinator, until the run has ended."""
        backoff = Backoff(FIRST_BACKOFF_SECONDS, MAXIMUM_BACKOFF_SECONDS)
        while not self.finished:
            if self._leaving_until_resumed:
                self._leaving_until_resumed = False
                await volunteer.give_up_stage()
            await self._awake.wait()
            if not await volunteer.wait_may_attach():
                return
            problem = await self._attach_once(volunteer, backoff)
            if self.finished:
                return
            self.problem = problem
            if self._leaving_until_resumed or not self._awake.is_set():
                continue
            if self.leaving:
                self._report("the coordinator cannot be reached; leaving without its confirmation")
                return
            if isinstance(problem, RefusedForNow):
                # A refusal of 0 seconds would be asked for again at once, and for ever.
                await self._sit_out(problem, volunteer, with_jitter(backoff.next(), 0.2))
                if self.leaving:
                    return
            else:
                await self._pause(with_jitter(backoff.next(), 0.2))

    async def _attach_once(self, volunteer: Volunteer, backoff: Backoff) -> SwarmError | None:
        """Open one session and run it to its end; return the reason why it ended."""
        self._session_closed = trio.Event()
        problem: SwarmError | None = None
        try:
            with trio.CancelScope() as self._attempt:
                async with attach(self._node, self._invite, self._hello(volunteer)) as session:
                    backoff.reset()
                    self._self_tested = False
                    problem = await self._run_session(session, volunteer)
        except (NetworkError, ProtocolError) as error:
            problem = error
        finally:
            self._attempt = None
            self._session_closed.set()
        return problem

    def _hello(self, volunteer: Volunteer) -> Hello:
        additions = {"instance": self._instance, "self_tested": self._self_tested}
        return volunteer.hello().model_copy(update=additions)

    async def _sit_out(
        self, refusal: RefusedForNow, volunteer: Volunteer, least_seconds: float
    ) -> None:
        """Wait until a refusal ends: by a self-test of this machine, where that ends it.

        MachineError if the self-test finds a fault.
        """
        until = trio.current_time() + refusal.retry_seconds
        explained = str(refusal)
        self._self_tested = False
        if refusal.self_test:
            self._report(explained)
            await volunteer.give_up_stage()
            try:
                self._self_tested = await volunteer.self_test()
                return
            except MachineError:
                raise
            except SwarmError as error:
                explained = f"the self-test of this machine could not be carried out: {error}"
        seconds = max(least_seconds, until - trio.current_time())
        self._report(f"{explained}; trying again in {duration_text(seconds)}")
        if not self.leaving:
            await self._wait(seconds)

    async def _pause(self, seconds: float) -> None:
        reason = "" if self.problem is None else f" ({self.explain(self.problem)})"
        line = self._absence.line(reason, trio.current_time())
        if line is not None:
            self._report(line)
        await self._wait(seconds)

    async def _wait(self, seconds: float) -> None:
        self._attach_now = trio.Event()
        with trio.move_on_after(seconds):
            await self._attach_now.wait()

    async def _run_session(
        self, session: CoordinatorSession, volunteer: Volunteer
    ) -> SwarmError | None:
        """Run one session; return the reason why it ended."""
        welcome = session.welcome
        if welcome.finished:
            goodbye = await session.receive()
            if not isinstance(goodbye, Goodbye):
                raise ProtocolError(f"the coordinator of a finished run sent {goodbye.kind!r}")
            self._take_goodbye(goodbye)
            return None
        limits = await volunteer.accept_welcome(welcome)
        self.session = session
        self.problem = None
        self._absence = AbsenceReports()
        problem: SwarmError | None = None
        try:
            async with trio.open_nursery() as nursery:
                self._scope = nursery.cancel_scope
                nursery.start_soon(session.write_all)
                nursery.start_soon(
                    session.send_heartbeats, heartbeat_seconds(welcome, limits), volunteer.heartbeat
                )
                nursery.start_soon(
                    self._report_receipts, volunteer, limits.receipt_interval_seconds
                )
                if self.leaving or self._leaving_until_resumed or not self._awake.is_set():
                    session.send(Leaving())
                self._bound_leaving()
                if not welcome.keep:
                    nursery.start_soon(volunteer.join_run, welcome)
                while not self.finished:
                    message = await session.receive()
                    if isinstance(message, Goodbye):
                        self._take_goodbye(message)
                        break
                    await volunteer.handle(message)
                nursery.cancel_scope.cancel()
        except* (AdmissionError, VersionError, CapacityError) as refusals:
            raise root_error(refusals) from None
        except* (NetworkError, ProtocolError) as errors:
            problem = root_error(errors)
        finally:
            self.session = self._scope = None
            volunteer.detached()
        return problem

    def _take_goodbye(self, message: Goodbye) -> None:
        introduction = "" if message.finished else "the coordinator ended the session: "
        self._report(f"{introduction}{message.reason}")
        self.finished = message.finished or self.leaving

    async def _report_receipts(self, volunteer: Volunteer, interval_seconds: float) -> None:
        while True:
            await trio.sleep(interval_seconds)
            batch = volunteer.take_receipts()
            if batch:
                self.send(Receipts(receipts=batch))
