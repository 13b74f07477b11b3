"""States of a daemon and the reasons for them: part of `swarm_client.control.status_document`,
without pydantic.

A view needs these before its first frame, and pydantic only after it.
"""

from __future__ import annotations

from enum import StrEnum


class DaemonState(StrEnum):
    """The state of a daemon or of one of its devices."""

    CONTRIBUTING = "contributing"
    SYNCING = "syncing"
    """Joining, or downloading a stage."""
    QUEUED = "queued"
    """Ready, with nothing to compute at the moment."""
    DEGRADED = "degraded"
    """Working, but something is wrong: `sentence` says what, and what resolves it."""
    PAUSED = "paused"
    STOPPED = "stopped"
    """The daemon runs and works on no run."""


class SuspendReason(StrEnum):
    """Why nothing is computed. BOINC's names where it has one."""

    PAUSED_BY_USER = "paused_by_user"
    ON_BATTERIES = "on_batteries"
    USER_ACTIVE = "user_active"
    CPU_BUSY = "cpu_busy"
    """Other programs use more of the processor than the preference allows."""
    TIME_OF_DAY = "time_of_day"
    NETWORK_HOURS = "network_hours"
    EXCLUSIVE_APP = "exclusive_app"
    TOO_HOT = "too_hot"
    QUOTA_USED = "quota_used"
    DISK_FULL = "disk_full"
    MEMORY_SHORT = "memory_short"
    MACHINE_SLEEPS = "machine_sleeps"
    """The machine is about to sleep, and has not said yet that it is awake."""
    FINISHING = "finishing"
    NO_RUN = "no_run"
    COORDINATOR_AWAY = "coordinator_away"
    RUN_FINISHED = "run_finished"
    NOT_ADMITTED = "not_admitted"
