"""The volunteer's daemon: which run is worked on, what ends that, and who may ask (trio).

Owns a home for as long as it runs: its lock, its log, the socket for commands, what is remembered
of runs, and the user's own pause. A stay in a run is `stay`'s; why nothing is computed otherwise
is the volunteer's. In the foreground it ends with its stay; otherwise it waits for the next word.
Ctrl-C or SIGTERM once leaves cleanly, twice at once.
"""

from __future__ import annotations

import datetime
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from swarm_client.control import contribution_log as diaries
from swarm_client.control import known_runs
from swarm_client.control.gauges import Gauges
from swarm_client.control.known_runs import RunBook, StoredPause
from swarm_client.control.log_buffer import LogBook
from swarm_client.control.messages import JoinArguments
from swarm_client.control.server import Preferences, Service
from swarm_client.control.status_document import Status, SuspendReason
from swarm_client.control.status_sentence import SENTENCES, Stopped, clock_text
from swarm_client.control.suspension import Suspension
from swarm_client.daemon.participation import stay
from swarm_client.daemon.sleep_watch import Absence, AbsenceWatch
from swarm_client.daemon.status_builder import DaemonFacts, Reporter, stopped_by
from swarm_client.governor.governor import Governor
from swarm_client.machine.home import Home
from swarm_client.machine.log_file import write_log
from swarm_client.machine.sd_notify import Notifier
from swarm_client.preferences.control import PreferenceDesk
from swarm_client.preferences.layers import preferences_path
from swarm_client.volunteer.contribution import Contribution
from swarm_client.volunteer.device_group import Crew
from swarm_client.volunteer.volunteer import Volunteer
from swarm_shared.base.clock import Clock, monotonic, wall
from swarm_shared.base.error_groups import expected_error
from swarm_shared.base.errors import StorageError, SwarmError, UsageError
from swarm_shared.base.local_server import serve_lines
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.run.manifest import Manifest

LEAVE_SECONDS = 60.0
"""How long a clean leave may take; a step of a large model can be longer, then it is cut off."""

ENDING_SECONDS = LEAVE_SECONDS + 20.0
"""What the service manager is told: leaving, then ending workers and saving what is known."""

SAVE_SECONDS = 60.0
"""Between two writes of the diary; a crash loses so much of it, and nothing of what counts."""

LOOK_SECONDS = 5.0
"""Between two looks at the clock while a pause has an end: a machine may have slept."""

log = logging.getLogger(__name__)

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    home: Path | None
    first: JoinArguments | None = None
    """The run to begin with; None: the one that was chosen last."""
    resume: bool = True
    """Take that one up."""
    foreground: bool = False
    """End with the first stay, and let its error end the program."""


async def run_daemon(
    options: DaemonOptions, report: Report, notifier: Notifier | None = None
) -> None:
    """Until somebody ends it. SwarmError when it cannot run, or its stay in the foreground."""
    if options.first is not None:
        Invite.decode(options.first.invite)
    home = Home.at(options.home)
    with home.locked():
        write_log(home)
        daemon = Daemon(home, report, foreground=options.foreground, notifier=notifier)
        logging.getLogger("swarm_client").addHandler(daemon.log_book)
        logging.getLogger("swarm_shared").addHandler(daemon.log_book)
        try:
            await daemon.run(options.first, resume=options.resume)
        finally:
            logging.getLogger("swarm_client").removeHandler(daemon.log_book)
            logging.getLogger("swarm_shared").removeHandler(daemon.log_book)


class Daemon:
    """Made inside trio, with its home locked. Satisfies `service.Controlled`."""

    def __init__(
        self,
        home: Home,
        report: Report,
        *,
        foreground: bool = False,
        notifier: Notifier | None = None,
        wall_clock: Clock = wall,
        clock: Clock = monotonic,
    ) -> None:
        self.home = home
        self.identity = Identity.load_or_create(home.identity_path)
        self.log_book = LogBook(wall_clock)
        self.preferences: Preferences | None = PreferenceDesk(
            preferences_path(home.path),
            lambda: () if self._wanted is None else self._wanted.preferences,
        )
        self.crew: Crew | None = None
        self.governor: Governor | None = None
        self._report = report
        self._foreground = foreground
        self._notifier = notifier or Notifier()
        self._wall, self._clock = wall_clock, clock
        self._started_at = wall_clock()
        self._book = known_runs.read(home.runs_path)
        self._diary = diaries.read(home.contribution_path)
        self._diary_saved = self._diary
        self._gauges = Gauges(home.path)
        self._reporter = Reporter()
        self._contribution = Contribution(on_step=self._counted)
        self._last_step: int | None = None
        self._absence: Absence | None = None
        self._wanted: JoinArguments | None = None
        """The run to work on."""
        self._stopped = Stopped(SuspendReason.NO_RUN)
        self.failure: SwarmError | None = None
        self._ending = False
        self._stay: trio.CancelScope | None = None
        self._handing_over = False
        self._changed = trio.Event()

    # ---- life

    async def run(self, first: JoinArguments | None, *, resume: bool = True) -> None:
        if first is not None:
            self._set_book(self._book.pausing(None))
            self._wanted = first
        elif resume and (chosen := self._book.chosen_run()) is not None:
            self._wanted = chosen.join
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._take_signals)
                nursery.start_soon(self._serve)
                nursery.start_soon(self._keep_diary)
                nursery.start_soon(self._end_pause)
                nursery.start_soon(AbsenceWatch(self._back).run)
                await self._work()
                nursery.cancel_scope.cancel()
        finally:
            self._save_diary()

    def event(self, text: str) -> None:
        """One line for people: where this program prints, and for whoever asks for the log."""
        self.log_book.event(text)
        self._report(text)
        self._notifier.status(text)

    def _back(self, absence: Absence) -> None:
        self._absence = absence
        joined = self.crew is not None
        self.event(f"{absence.sentence}; joining again" if joined else absence.sentence)

    async def _serve(self) -> None:
        try:
            await serve_lines(
                self.home.socket_path, Service(self).converse, on_listening=self._notifier.ready
            )
        except StorageError as error:
            if not self._foreground:
                raise
            self.event(f"commands from other terminals cannot reach this client: {error}")

    async def _work(self) -> None:
        while not self._ending:
            if self._wanted is not None and self._book.pause is None:
                await self._take_part(self._wanted)
            elif self._wanted is None and self._foreground:
                return
            else:
                await self._changed.wait()

    async def _take_part(self, join: JoinArguments) -> None:
        """One stay, to its end; what comes next is in `_wanted` then."""
        finished = False
        begun = None
        try:
            with trio.CancelScope() as self._stay:
                invite = Invite.decode(join.invite)
                begun = await stay(
                    join, invite, self.home, self.identity, self._contribution, self.event,
                    lambda crew, governor: self._begun(crew, governor, join),
                )  # fmt: skip
                finished = begun.finished
        except BaseException as error:
            expected = expected_error(error)
            if expected is None or self._foreground:
                raise
            self._failed(join, expected)
        finally:
            if self.crew is not None:
                self.event(str(self._contribution))
            self.crew, self._stay, self._handing_over = None, None, False
            self.governor = None
        if finished and self._wanted is join:
            self._wanted, self._stopped = None, Stopped(SuspendReason.RUN_FINISHED)
            self._set_book(self._book.choosing(None))

    def _failed(self, join: JoinArguments, error: SwarmError) -> None:
        self.event(f"error: {error}")
        if self._wanted is join:
            self._wanted, self._stopped = None, stopped_by(error)
            self.failure = error

    def _begun(self, crew: Crew, governor: Governor, join: JoinArguments) -> None:
        self.crew, self.governor = crew, governor
        self.failure = None
        for volunteer in crew.volunteers:
            volunteer.on_admitted = partial(self._admitted, volunteer, join)
        if self._book.pause is not None:
            crew.suspend(SuspendReason.PAUSED_BY_USER, self._book.pause.until)

    def _admitted(self, volunteer: Volunteer, join: JoinArguments, manifest: Manifest) -> None:
        if self._wanted is join:
            run = str(volunteer.invite.run_id)
            self._set_book(self._book.joined(run, manifest.name, join, self._wall()))

    async def _take_signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                if self._handing_over or not self._can_hand_over():
                    self.event("leaving at once")
                    self._notifier.stopping(ENDING_SECONDS)
                    self._ending, self._wanted = True, None
                    self._cut_off()
                else:
                    self.event("leaving: finishing what is in flight (once more to leave at once)")
                    self._end_with(ending=True)

    # ---- what is remembered

    def _set_book(self, book: RunBook) -> None:
        """A full disk is no reason to stop: it is said, and remembered for as long as we run."""
        self._book = book
        try:
            known_runs.write(self.home.runs_path, book)
        except StorageError as error:
            self.event(f"what is known of runs could not be saved: {error}")

    def _counted(self, step: int, microbatches: int, tokens: int, credit: float) -> None:
        today = datetime.datetime.fromtimestamp(self._wall()).date()
        new = int(step != self._last_step)
        self._last_step = step
        self._diary = self._diary.with_step(today, microbatches, tokens, credit, new)

    async def _keep_diary(self) -> None:
        while True:
            await trio.sleep(SAVE_SECONDS)
            self._save_diary()

    def _save_diary(self) -> None:
        if self._diary is self._diary_saved:
            return
        try:
            diaries.write(self.home.contribution_path, self._diary)
            self._diary_saved = self._diary
        except StorageError as error:
            log.warning("what was given could not be saved: %s", error)

    # ---- ends of a stay

    def _can_hand_over(self) -> bool:
        return self.crew is not None and self.crew.attached

    def _end_with(self, *, ending: bool = False) -> None:
        """End the stay: in order where there is somebody to hand over to."""
        if ending:
            self._notifier.stopping(ENDING_SECONDS)
        self._ending = self._ending or ending
        self._wanted = None
        if self._stay is None:
            self._wake()
        elif self._can_hand_over():
            assert self.crew is not None
            self._handing_over = True
            self.crew.leave()
            self._stay.deadline = trio.current_time() + LEAVE_SECONDS
        else:
            self._cut_off()

    def _cut_off(self) -> None:
        if self._stay is not None:
            self._stay.cancel()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # ---- what commands ask for

    async def status(self) -> Status:
        machine = await trio.to_thread.run_sync(self._gauges.read)
        pause = self._book.pause
        status = self._reporter.status(
            self.crew,
            DaemonFacts(
                now=self._wall(), moment=self._clock(), started_at=self._started_at,
                peer=self.identity.peer_id,
                name=None if self._wanted is None else self._wanted.name,
                runs=self._book.told(),
                suspension=None
                if pause is None or self._wanted is None
                else Suspension(SuspendReason.PAUSED_BY_USER, pause.until),
                stopped=self._stopped, diary=self._diary, machine=machine, absence=self._absence,
            ),
        )  # fmt: skip
        return status if self.governor is None else self.governor.completed(status)

    def pause(self, seconds: float | None) -> str:
        now = self._wall()
        until = None if seconds is None else now + seconds
        self._set_book(self._book.pausing(StoredPause(until=until)))
        if self.crew is not None:
            self.crew.suspend(SuspendReason.PAUSED_BY_USER, until)
        self._wake()
        end = "until `swarm-client resume`" if until is None else f"until {clock_text(until, now)}"
        self.event(f"paused {end}")
        return f"paused {end}"

    def resume(self) -> str:
        paused = self._book.pause is not None
        if paused:
            self._set_book(self._book.pausing(None))
        crew = self.crew
        suspended = None if crew is None else crew.suspended
        if crew is not None and suspended is not None:
            if suspended.reason is not SuspendReason.PAUSED_BY_USER:
                return f"nothing is paused by you; still {SENTENCES[suspended.reason]}"
            crew.resume()
        elif self._wanted is None and (chosen := self._book.chosen_run()) is not None:
            self._wanted = chosen.join
            self._wake()
            self.event(f"going on with run {chosen.name!r}")
            return f"going on with run {chosen.name!r}"
        self._wake()
        if self._wanted is None:
            return SENTENCES[SuspendReason.NO_RUN]
        if paused:
            self.event("going on")
        return "going on" if paused else "nothing was paused"

    def finish(self) -> str:
        """Hand over and stop; the run stays chosen, and `resume` takes it up again."""
        self._stopped = Stopped(SuspendReason.NO_RUN, "finished; `swarm-client resume` goes on")
        return self._stop_working("finishing: completing what is in hand, then handing over")

    def leave(self) -> str:
        """The same, and the run is not chosen any more."""
        self._set_book(self._book.choosing(None))
        self._stopped = Stopped(SuspendReason.NO_RUN)
        return self._stop_working("leaving the run: finishing what is in flight")

    def shutdown(self) -> str:
        """End the daemon; the next one goes on with the chosen run."""
        said = "ending: finishing what is in flight" if self._can_hand_over() else "ending"
        self.event(said)
        self._end_with(ending=True)
        return said

    def _stop_working(self, said: str) -> str:
        if self._wanted is None and self._stay is None:
            return SENTENCES[SuspendReason.NO_RUN]
        self.event(said)
        self._end_with()
        return said

    def join(self, join: JoinArguments) -> str:
        invite = Invite.decode(join.invite)
        if self._ending:
            raise UsageError("the daemon is ending; try again in a moment")
        if self.crew is not None and self._wanted == join:
            return f"already at work for run {str(invite.run_id)[:12]}"
        self._set_book(self._book.pausing(None))
        self._switch_to(join)
        return f"joining run {str(invite.run_id)[:12]}"

    def _switch_to(self, join: JoinArguments) -> None:
        """Leave what is worked on in order, then take that up."""
        self.failure = None
        self._end_with()
        self._wanted = join
        self._wake()

    def runs(self) -> RunBook:
        return self._book

    def choose_run(self, wanted: str) -> str:
        run = self._book.find(wanted)
        if self._book.chosen == run.id and self._wanted is not None:
            return f"run {run.name!r} is worked on already"
        self._set_book(self._book.choosing(run.id))
        self._switch_to(run.join)
        self.event(f"run {run.name!r} is chosen")
        return f"run {run.name!r} is chosen"

    def forget_run(self, wanted: str) -> str:
        run = self._book.find(wanted)
        if self._book.chosen == run.id and self._wanted is not None:
            raise UsageError(
                f"run {run.name!r} is worked on; `swarm-client leave` first, then forget it"
            )
        self._set_book(self._book.without(run.id))
        return f"run {run.name!r} is forgotten; to join it again takes an invite"

    async def _end_pause(self) -> None:
        """The user's pause, when its time is over."""
        while True:
            pause = self._book.pause
            if pause is None or pause.until is None:
                await self._changed.wait()
            elif self._wall() >= pause.until:
                self.resume()
            else:
                with trio.move_on_after(min(LOOK_SECONDS, pause.until - self._wall())):
                    await self._changed.wait()
