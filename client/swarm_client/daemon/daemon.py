"""The volunteer's daemon: which run it works on, what ends that, and the commands it carries out
(trio).

Owns a home while it runs: its lock, its log, the control socket, the stored runs, and the user's
own pause. One participation in a run is `swarm_client.daemon.participation`'s; why nothing is
computed otherwise is the volunteer's. In the foreground it ends with its participation; otherwise
it waits for the next command. One Ctrl-C or SIGTERM, or a closed terminal, leaves in order, a
second signal at once.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import trio

from swarm_client.control import known_runs
from swarm_client.control.contribution_log import ContributionCounter, ContributionLog
from swarm_client.control.known_runs import StoredPause, StoredRuns
from swarm_client.control.log_buffer import LogBuffer
from swarm_client.control.messages import (
    ConfigArguments,
    JoinArguments,
    NoArguments,
    PauseArguments,
    RunArguments,
    error_report_of,
)
from swarm_client.control.server import ControlSocketServer, Method, order, query
from swarm_client.control.status_document import InterruptionView, Status, SuspendReason
from swarm_client.control.status_sentence import SENTENCES, StopCause, Suspension, clock_text
from swarm_client.control.stored_file import read_document, write_document
from swarm_client.daemon.participation import participate
from swarm_client.daemon.sleep_watch import SleepWatch
from swarm_client.daemon.status_builder import DaemonFacts, StatusBuilder, stopped_by
from swarm_client.governor.governor import Governor
from swarm_client.governor.probes.all import SystemProbes
from swarm_client.governor.probes.readings import Readings
from swarm_client.machine.home import Home
from swarm_client.machine.log_file import LOGGERS, write_log
from swarm_client.machine.sd_notify import Notifier
from swarm_client.membership.membership import Membership
from swarm_client.preferences.control import shown
from swarm_client.preferences.file import set_preference
from swarm_client.preferences.layers import preferences_path
from swarm_client.volunteer.device_group import DeviceGroup
from swarm_shared.base.clock import Clock, monotonic, wall
from swarm_shared.base.error_groups import expected_error
from swarm_shared.base.errors import StorageError, SwarmError, UsageError
from swarm_shared.base.local_server import serve_lines
from swarm_shared.host.stop_signals import asks_again, stop_signals
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity

LEAVE_SECONDS = 60.0
"""Seconds that an orderly leave may take; a longer step of a large model is cut off."""

ENDING_SECONDS = LEAVE_SECONDS + 20.0
"""Seconds announced to the service manager for leaving, ending workers and saving."""

SAVE_INTERVAL_SECONDS = 60.0
"""Seconds between two writes of the contribution log; a crash loses that much of it, and nothing of
the run's ledger."""

CHECK_SECONDS = 5.0
"""Seconds between two checks of a pause's end; the machine may have slept."""

log = logging.getLogger(__name__)

Report = Callable[[str], None]


async def run_daemon(
    place: Path | None,
    report: Report,
    first: JoinArguments | None = None,
    *,
    resume: bool = True,
    notifier: Notifier | None = None,
) -> None:
    """Run until ended: with `first` in the foreground, up to the end of that participation,
    otherwise with the run chosen last if it is to `resume`.

    SwarmError when the daemon cannot run, or when its participation in the foreground fails.
    """
    if first is not None:
        Invite.decode(first.invite)
    home = Home.create(place)
    with home.locked():
        write_log(home)
        daemon = Daemon(home, report, foreground=first is not None, notifier=notifier)
        for logger in LOGGERS:
            logger.addHandler(daemon.log_buffer)
        try:
            await daemon.run(first, resume=resume)
        finally:
            for logger in LOGGERS:
                logger.removeHandler(daemon.log_buffer)


class Daemon:
    """Made inside trio, with its home locked. Commands that return text return one sentence that
    says what happens now."""

    def __init__(
        self,
        home: Home,
        report: Report,
        *,
        foreground: bool = False,
        notifier: Notifier | None = None,
        wall_clock: Clock = wall,
    ) -> None:
        self.home = home
        self.identity = Identity.load_or_create(home.identity_path)
        self.log_buffer = LogBuffer(wall_clock)
        self._preferences_path = preferences_path(home.path)
        self._governor: Governor | None = None
        """The governor of the participation, once its devices are there."""
        self._report = report
        self._foreground = foreground
        self._notifier = notifier or Notifier()
        self._wall = wall_clock
        self._started_at = wall_clock()
        self._stored_runs = known_runs.read(home.runs_path)
        self._saved_contribution_log = read_document(home.contribution_path, ContributionLog())
        self._contribution = ContributionCounter(self._saved_contribution_log, wall_clock)
        self._probes = SystemProbes(home.path)
        self._probes_lock = trio.Lock()
        self._status_builder = StatusBuilder()
        self._interruption: InterruptionView | None = None
        self._target: JoinArguments | None = None
        """The run to work on."""
        self._stopped = StopCause(SuspendReason.NO_RUN)
        self.failure: SwarmError | None = None
        """The error that ended the last participation, until another one begins."""
        self._ending = False
        self._participation_scope: trio.CancelScope | None = None
        self._handing_over = False
        self._changed = trio.lowlevel.ParkingLot()
        """Tasks that wait for another run, another pause, or the end."""

    # ---- life

    async def run(self, first: JoinArguments | None, *, resume: bool = True) -> None:
        """Serve commands and work on runs until the daemon ends: on `first`, or on the chosen run
        if `resume`."""
        if first is not None:
            self._store_runs(self._stored_runs.pausing(None))
            self._target = first
        elif resume and (chosen := self._stored_runs.chosen_run()) is not None:
            self._target = chosen.join
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._take_signals)
                nursery.start_soon(self._serve)
                nursery.start_soon(self._keep_contribution_log)
                nursery.start_soon(self._end_pause)
                nursery.start_soon(SleepWatch(self._interrupted).run)
                nursery.start_soon(self._announce_sleep)
                await self._work()
                nursery.cancel_scope.cancel()
        finally:
            self._save_contribution_log()

    def event(self, text: str) -> None:
        """Report one line for people: on the terminal, in the log buffer, and to the service
        manager."""
        self.log_buffer.event(text)
        self._report(text)
        self._notifier.status(text)

    def _interrupted(self, interruption: InterruptionView) -> None:
        self._interruption = interruption
        joined = self.device_group is not None
        self.event(f"{interruption.sentence}; joining again" if joined else interruption.sentence)

    async def _serve(self) -> None:
        server = ControlSocketServer(self.status, self.log_buffer, self.methods())
        try:
            await serve_lines(
                self.home.socket_path, server.converse, on_listening=self._notifier.ready
            )
        except StorageError as error:
            if not self._foreground:
                raise
            self.event(f"commands from other terminals cannot reach this daemon: {error}")

    async def _work(self) -> None:
        while not self._ending:
            if self._target is not None and self._stored_runs.pause is None:
                await self._take_part(self._target)
            elif self._target is None and self._foreground:
                return
            else:
                await self._changed.park()

    async def _take_part(self, join: JoinArguments) -> None:
        """Participate once, to the end; what comes next is in `_target` then."""
        finished = False
        try:
            with trio.CancelScope() as self._participation_scope:
                invite = Invite.decode(join.invite)
                device_group = await participate(
                    join, invite, self.home, self.identity, self._contribution, self.event,
                    self._participation_began, partial(self._admitted, join),
                )  # fmt: skip
                finished = device_group.finished
        except BaseException as error:
            expected = expected_error(error)
            if expected is None or self._foreground:
                raise
            self._failed(join, expected)
        finally:
            if self.device_group is not None and self._contribution.steps:
                self.event(str(self._contribution))
            self._governor, self._participation_scope, self._handing_over = None, None, False
        if finished and self._target is join:
            self._target, self._stopped = None, StopCause(SuspendReason.RUN_FINISHED)
            self._store_runs(self._stored_runs.choosing(None))

    def _failed(self, join: JoinArguments, error: SwarmError) -> None:
        self.event(f"error: {error}")
        if self._target is join:
            self._target, self._stopped = None, stopped_by(error)
            self.failure = error

    # ---- a sleep of the machine

    async def _announce_sleep(self) -> None:
        """Say goodbye before the machine sleeps, where logind announces that."""
        if sys.platform != "linux":
            return
        from swarm_client.daemon.sleep_lock import SleepLock
        from swarm_client.machine.dbus import system_bus

        bus = system_bus(os.environ)
        if bus is not None:
            await SleepLock(bus, self._fall_asleep, self._wake_devices).run()

    async def _fall_asleep(self, seconds: float) -> None:
        if self.device_group is not None:
            self.event("this machine is about to sleep: leaving the run until it is awake")
            await self.device_group.fall_asleep(seconds)

    def _wake_devices(self) -> None:
        if self.device_group is not None:
            self.event("this machine is awake: attaching again")
            self.device_group.wake()

    # ---- a participation (`swarm_client.daemon.participation`)

    @property
    def device_group(self) -> DeviceGroup | None:
        """The volunteers of the participation; None while no run is worked on."""
        return None if self._governor is None else self._governor.device_group

    def _participation_began(self, governor: Governor) -> None:
        self._governor, self.failure = governor, None
        if self._stored_runs.pause is not None:
            governor.device_group.pause(self._stored_runs.pause.until)

    def _admitted(self, join: JoinArguments, membership: Membership) -> None:
        if self._target is join:
            run, name = str(membership.run), membership.manifest.name
            self._store_runs(self._stored_runs.joined(run, name, join, self._wall()))

    # ---- signals

    async def _take_signals(self) -> None:
        leaving_at_once = False
        with trio.open_signal_receiver(*stop_signals()) as signals:
            async for number in signals:
                if leaving_at_once or (self._handing_over and not asks_again(number)):
                    continue  # received, so that none ends the process before its workers
                if self._handing_over or not self._can_hand_over():
                    leaving_at_once = True
                    self.event("leaving at once")
                    self._notifier.stopping(ENDING_SECONDS)
                    self._ending, self._target = True, None
                    self._cancel_participation()
                else:
                    self.event(
                        "leaving: finishing what is in flight (press Ctrl-C again to leave at once)"
                    )
                    self._end_participation(ending=True)

    # ---- stored state

    def _store_runs(self, book: StoredRuns) -> None:
        """Keep and store the runs. A full disk is no reason to stop: it is reported, and the runs
        are kept in memory."""
        self._stored_runs = book
        try:
            known_runs.write(self.home.runs_path, book)
        except StorageError as error:
            self.event(f"the list of runs could not be saved: {error}")

    async def _keep_contribution_log(self) -> None:
        while True:
            await trio.sleep(SAVE_INTERVAL_SECONDS)
            self._save_contribution_log()

    def _save_contribution_log(self) -> None:
        newest = self._contribution.log
        if newest is self._saved_contribution_log:
            return
        try:
            write_document(self.home.contribution_path, newest)
            self._saved_contribution_log = newest
        except StorageError as error:
            log.warning("the contribution log could not be saved: %s", error)

    # ---- end of a participation

    def _can_hand_over(self) -> bool:
        return self.device_group is not None and self.device_group.attached

    def _end_participation(self, *, ending: bool = False) -> None:
        """End the participation; in order while the coordinator is attached."""
        if ending:
            self._notifier.stopping(ENDING_SECONDS)
        self._ending = self._ending or ending
        self._target = None
        if self._participation_scope is None:
            self._wake()
        elif self._can_hand_over():
            assert self.device_group is not None
            self._handing_over = True
            self.device_group.leave()
            self._participation_scope.deadline = trio.current_time() + LEAVE_SECONDS
        else:
            self._cancel_participation()

    def _cancel_participation(self) -> None:
        if self._participation_scope is not None:
            self._participation_scope.cancel()
        self._wake()

    def _wake(self) -> None:
        self._changed.unpark_all()

    # ---- commands

    def methods(self) -> dict[str, Method]:
        """The methods of the control API (docs/control-api.md) that change or report this state."""
        return {
            "pause": order(PauseArguments, lambda arguments: self.pause(arguments.seconds)),
            "resume": order(NoArguments, lambda _: self.resume()),
            "finish": order(NoArguments, lambda _: self.finish()),
            "leave": order(NoArguments, lambda _: self.leave()),
            "shutdown": order(NoArguments, lambda _: self.shutdown()),
            "join": order(JoinArguments, self.join),
            "failure": query(NoArguments, self._failure_report),
            "runs": query(
                NoArguments,
                lambda _: {"runs": [run.model_dump() for run in self._stored_runs.listed()]},
            ),
            "choose_run": order(RunArguments, lambda arguments: self.choose_run(arguments.run)),
            "forget_run": order(RunArguments, lambda arguments: self.forget_run(arguments.run)),
            "config_show": query(NoArguments, self._show_preferences),
            "config_set": query(ConfigArguments, self._set_preference),
        }

    def _show_preferences(self, _: NoArguments) -> dict[str, Any]:
        flags = () if self._target is None else self._target.preferences
        return shown(self._preferences_path, flags)

    def _set_preference(self, arguments: ConfigArguments) -> dict[str, Any]:
        """Change the file, where a running governor finds it at its next tick. Flags and the
        environment are not changed: they belong to the user who started the program."""
        return {
            "value": set_preference(self._preferences_path, arguments.name, arguments.text or None)
        }

    def _failure_report(self, _: NoArguments) -> dict[str, Any]:
        return {
            "problem": None if self.failure is None else error_report_of(self.failure).model_dump()
        }

    async def status(self) -> Status:
        """Return the status that the control API reports."""
        governor = self._governor
        readings = await self._read_system() if governor is None else governor.readings
        pause = self._stored_runs.pause
        return self._status_builder.status(
            governor,
            DaemonFacts(
                now=self._wall(), moment=monotonic(), started_at=self._started_at,
                peer=self.identity.peer_id,
                name=None if self._target is None else self._target.name,
                runs=self._stored_runs.listed(),
                suspension=None
                if pause is None or self._target is None
                else Suspension(SuspendReason.PAUSED_BY_USER, pause.until),
                stopped=self._stopped, contribution_log=self._contribution.log, readings=readings,
                interruption=self._interruption,
            ),
        )  # fmt: skip

    async def _read_system(self) -> Readings:
        async with self._probes_lock:
            return await trio.to_thread.run_sync(self._probes.read_system)

    def pause(self, seconds: float | None) -> str:
        """Begin the user's pause, for some seconds or until `resume`; it is stored, so that a
        restart keeps it."""
        now = self._wall()
        until = None if seconds is None else now + seconds
        self._store_runs(self._stored_runs.pausing(StoredPause(until=until)))
        if self.device_group is not None:
            self.device_group.pause(until)
        self._wake()
        end = "until `swarm-client resume`" if until is None else f"until {clock_text(until, now)}"
        self.event(f"paused {end}")
        return f"paused {end}"

    def resume(self) -> str:
        """End the user's pause; without one, continue the chosen run."""
        paused = self._stored_runs.pause is not None
        if paused:
            self._store_runs(self._stored_runs.pausing(None))
        device_group = self.device_group
        suspended = None if device_group is None else device_group.suspended
        if device_group is not None and suspended is not None:
            if suspended.reason is not SuspendReason.PAUSED_BY_USER:
                return f"you have not paused it; it is {SENTENCES[suspended.reason]}"
            device_group.resume()
        elif self._target is None and (chosen := self._stored_runs.chosen_run()) is not None:
            self._target = chosen.join
            self._wake()
            self.event(f"continuing run {chosen.name!r}")
            return f"continuing run {chosen.name!r}"
        self._wake()
        if self._target is None:
            return SENTENCES[SuspendReason.NO_RUN]
        if paused:
            self.event("resumed")
        return "resumed" if paused else "nothing was paused"

    def finish(self) -> str:
        """Hand the stage over and stop; the run stays chosen, and `resume` continues it."""
        self._stopped = StopCause(
            SuspendReason.NO_RUN, "finished; `swarm-client resume` continues the run"
        )
        return self._stop_working(
            "finishing: completing what is in flight, then handing the stage over"
        )

    def leave(self) -> str:
        """Hand the stage over and stop; the run is not chosen any more."""
        self._store_runs(self._stored_runs.choosing(None))
        self._stopped = StopCause(SuspendReason.NO_RUN)
        return self._stop_working("leaving the run: finishing what is in flight")

    def shutdown(self) -> str:
        """End the daemon; the next one continues the chosen run."""
        message = "ending: finishing what is in flight" if self._can_hand_over() else "ending"
        self.event(message)
        self._end_participation(ending=True)
        return message

    def _stop_working(self, message: str) -> str:
        if self._target is None and self._participation_scope is None:
            return SENTENCES[SuspendReason.NO_RUN]
        self.event(message)
        self._end_participation()
        return message

    def join(self, join: JoinArguments) -> str:
        """Work on the run of an invite from now on, and end a pause. UsageError while the daemon
        ends."""
        invite = Invite.decode(join.invite)
        if self._ending:
            raise UsageError("the daemon is ending; try again in a moment")
        if self.device_group is not None and self._target == join:
            return f"already working on run {str(invite.run_id)[:12]}"
        self._store_runs(self._stored_runs.pausing(None))
        self._switch_to(join)
        return f"joining run {str(invite.run_id)[:12]}"

    def _switch_to(self, join: JoinArguments) -> None:
        """Leave the current run in order, then join this one."""
        self.failure, self._stopped = None, StopCause(SuspendReason.NO_RUN)
        self._end_participation()
        self._target = join
        self._wake()

    def choose_run(self, name_or_id: str) -> str:
        """Switch to a run that was joined before."""
        run = self._stored_runs.find(name_or_id)
        if self._stored_runs.chosen == run.id and self._target is not None:
            return f"run {run.name!r} is the current run already"
        self._store_runs(self._stored_runs.choosing(run.id))
        self._switch_to(run.join)
        self.event(f"switching to run {run.name!r}")
        return f"switching to run {run.name!r}"

    def forget_run(self, name_or_id: str) -> str:
        """Remove a run from the stored ones. UsageError for the run that is worked on."""
        run = self._stored_runs.find(name_or_id)
        if self._stored_runs.chosen == run.id and self._target is not None:
            raise UsageError(
                f"run {run.name!r} is the current run; leave it with `swarm-client leave` first"
            )
        self._store_runs(self._stored_runs.without(run.id))
        return f"run {run.name!r} is forgotten; joining it again needs an invite"

    async def _end_pause(self) -> None:
        """End the user's pause when its time is over."""
        while True:
            pause = self._stored_runs.pause
            if pause is None or pause.until is None:
                await self._changed.park()
            elif self._wall() >= pause.until:
                self.resume()
            else:
                with trio.move_on_after(min(CHECK_SECONDS, pause.until - self._wall())):
                    await self._changed.park()
