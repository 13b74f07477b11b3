"""The state of a daemon in one word and one sentence, or why it does nothing.

Pure: facts in, text out. Every sentence says what ends the state, where something does.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from swarm_client.control.status_document import DaemonState, DeviceView, SuspendReason

SENTENCES: dict[SuspendReason, str] = {
    SuspendReason.PAUSED_BY_USER: "paused by you; `swarm-client resume` continues",
    SuspendReason.ON_BATTERIES: "paused while this machine runs on battery power",
    SuspendReason.USER_ACTIVE: "paused while this machine is in use",
    SuspendReason.CPU_BUSY: "paused while other programs need the processor",
    SuspendReason.TIME_OF_DAY: "paused outside the hours that you allow for computing",
    SuspendReason.NETWORK_HOURS: "paused outside the hours that you allow for the network",
    SuspendReason.EXCLUSIVE_APP: "paused while one of your exclusive programs runs",
    SuspendReason.TOO_HOT: "paused until the device has cooled down",
    SuspendReason.QUOTA_USED: "paused: the transfer quota that you allow is used up",
    SuspendReason.DISK_FULL: "paused: the disk is too full; free some space",
    SuspendReason.MEMORY_SHORT: "paused: there is too little memory for a stage",
    SuspendReason.MACHINE_SLEEPS: "paused while this machine sleeps",
    SuspendReason.FINISHING: "finishing: completing what is in flight, then handing the stage over",
    SuspendReason.NO_RUN: "working on no run; `swarm-client join INVITE` joins one",
    SuspendReason.COORDINATOR_AWAY: (
        "no connection to the coordinator; this client keeps trying, and `swarm-client leave` ends "
        "that"
    ),
    SuspendReason.RUN_FINISHED: "the run is finished; `swarm-client join INVITE` joins another",
    SuspendReason.NOT_ADMITTED: "the run has not admitted this peer",
}
assert SENTENCES.keys() == set(SuspendReason)


@dataclass(frozen=True, slots=True)
class Suspension:
    """Why nothing is computed for now (`swarm_client.volunteer.pause` carries it out)."""

    reason: SuspendReason
    until: float | None = None
    """Unix seconds at which it ends by itself, where that is known. The caller that suspends keeps
    the time: nothing here resumes on its own."""


@dataclass(frozen=True, slots=True)
class StopCause:
    """Why no run is worked on."""

    reason: SuspendReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StatusFacts:
    stopped: StopCause | None = None
    leaving: bool = False
    suspension: Suspension | None = None
    attached: bool = False
    problem: str | None = None
    """The reason why there is no session; None before the first attempt has ended."""
    loading_stage: int | None = None
    """The stage that is being loaded."""
    stage: int | None = None
    """The stage that is held."""
    working: bool = False
    """True if something was computed or averaged a moment ago."""
    downloads: tuple[str, ...] = ()
    """Downloads in progress, with how far they are."""
    waiting_for: str = ""
    """What the run waits for, as the coordinator reports it."""
    away: str = ""
    """The last interruption; mentioned until a stage is held again."""


@dataclass(frozen=True, slots=True)
class StateDescription:
    """A state with its sentence and reason."""

    state: DaemonState
    sentence: str
    reason: SuspendReason | None = None
    until: float | None = None


def describe(facts: StatusFacts, now: float) -> StateDescription:
    """Describe the first fact that explains all others. `now` in Unix seconds."""
    if facts.stopped is not None and facts.suspension is None:
        return _with_reason(DaemonState.STOPPED, facts.stopped.reason, facts.stopped.detail)
    if facts.leaving:
        return _with_reason(DaemonState.PAUSED, SuspendReason.FINISHING)
    if facts.suspension is not None:
        return _suspended(facts.suspension, now)
    if not facts.attached and facts.problem is not None:
        detail = f"{facts.problem}; before that, {facts.away}" if facts.away else facts.problem
        return _with_reason(DaemonState.DEGRADED, SuspendReason.COORDINATOR_AWAY, detail)
    away = f"; before that, {facts.away}" if facts.away else ""
    if not facts.attached:
        return StateDescription(DaemonState.SYNCING, f"connecting to the run's coordinator{away}")
    if facts.stage is None and facts.loading_stage is not None:
        loading = _downloading(facts) or f"loading stage {facts.loading_stage}"
        return StateDescription(DaemonState.SYNCING, f"{loading}{away}")
    if facts.stage is None:
        return StateDescription(DaemonState.SYNCING, f"joining: waiting for a stage{away}")
    if facts.working:
        return StateDescription(DaemonState.CONTRIBUTING, f"computing stage {facts.stage}")
    waits = f"the run waits for {facts.waiting_for}" if facts.waiting_for else ""
    rest = _downloading(facts) or waits
    ends = f"; {rest}" if rest else ", with nothing to compute at the moment"
    return StateDescription(DaemonState.QUEUED, f"holding stage {facts.stage}{ends}")


def _downloading(facts: StatusFacts) -> str:
    return f"downloading {'; '.join(facts.downloads)}" if facts.downloads else ""


_STATE_PRECEDENCE = (
    DaemonState.DEGRADED, DaemonState.CONTRIBUTING, DaemonState.QUEUED, DaemonState.SYNCING,
    DaemonState.PAUSED, DaemonState.STOPPED,
)  # fmt: skip
"""The state of a machine with several devices is the first of these that one of its devices has: it
contributes while any device does, and is paused when all are."""
assert set(_STATE_PRECEDENCE) == set(DaemonState)


def combine_devices(devices: Sequence[DeviceView]) -> StateDescription:
    """The description of a machine from those of its devices; there is at least one."""
    first = min(devices, key=lambda device: _STATE_PRECEDENCE.index(device.state))
    sentence = first.sentence
    if any(d.sentence != first.sentence for d in devices):
        sentence = "; ".join(f"{d.id}: {d.sentence}" for d in devices)
    alike = all((d.state, d.until) == (first.state, first.until) for d in devices)
    return StateDescription(first.state, sentence, first.reason, first.until if alike else None)


def _with_reason(state: DaemonState, reason: SuspendReason, detail: str = "") -> StateDescription:
    sentence = SENTENCES[reason]
    return StateDescription(state, f"{sentence} ({detail})" if detail else sentence, reason)


def _suspended(suspension: Suspension, now: float) -> StateDescription:
    sentence, until = SENTENCES[suspension.reason], suspension.until
    if until is not None:
        head, _, tail = sentence.partition(";")
        sentence = f"{head} until {clock_text(until, now)}" + (f";{tail}" if tail else "")
    return StateDescription(DaemonState.PAUSED, sentence, suspension.reason, until)


def clock_text(then: float, now: float) -> str:
    """A time like 18:00, with the date if it is on another day."""
    when, today = datetime.datetime.fromtimestamp(then), datetime.datetime.fromtimestamp(now)
    return when.strftime("%H:%M" if when.date() == today.date() else "%H:%M on %d %B")
