"""What a daemon says about itself: one document, whole at any moment, and lines of its log.

Owns the form that `swarm-client status --json` prints and `swarm-client top` draws. Free of trio,
torch and libp2p: a view starts in a moment. Seconds of wall-clock time unless the name says
otherwise; rates are per second. A newer daemon may add fields, so readers leave what they do not
know alone; a field's meaning never changes without a new `API_VERSION`.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from swarm_client.control.reasons import DaemonState as DaemonState
from swarm_client.control.reasons import SuspendReason as SuspendReason

API_VERSION = 1


class StatusModel(BaseModel):
    """Base of what is read here: immutable; unknown keys of a newer daemon are left alone."""

    # Built at the first use, which for a view is after it has drawn its frame.
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class RunView(StatusModel):
    """The run that is worked on, as far as this peer has heard."""

    id: str
    name: str
    coordinator_attached: bool
    steps: int
    version: int
    """Applied steps."""
    loss: float | None = None
    """Nats per token in the last applied step."""
    tokens_per_second: float | None = None
    rebalancing: tuple[str, ...] = ()
    """The newest decisions, a sentence each, oldest first."""


class DeviceView(StatusModel):
    id: str
    """Like cpu or cuda:0; cpu#2 for the second one that shares it."""
    label: str
    stage: int | None = None
    phase: str = "idle"
    microbatches_per_second: float = 0.0
    queued: int = 0
    memory_bytes: int = 0
    """Offered to the run."""
    memory_used_bytes: int | None = None
    utilization: float | None = None
    """0 to 1; None when it cannot be read."""
    temperature_celsius: float | None = None
    duty_cycle: float = 1.0
    """Share of the time that it may compute, by the preferences."""
    peer: str = ""
    """Each device is a member of the run in its own right."""
    state: DaemonState | None = None
    reason: SuspendReason | None = None
    sentence: str = ""
    """These four as in `Status`, of this device."""
    until: float | None = None


class InterruptionView(StatusModel):
    """The last time that this program was away from its run without anybody's wish."""

    began: float
    seconds: float
    slept: bool
    """The machine did; else only this program was stopped."""
    sentence: str


class MachineView(StatusModel):
    cpu_share: float | None = None
    """Of all cores, by all programs, 0 to 1."""
    own_cpu_share: float | None = None
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    own_memory_bytes: int = 0
    on_batteries: bool | None = None
    user_idle_seconds: float | None = None
    disk_free_bytes: int = 0
    disk_used_bytes: int = 0
    """By this program's home."""


class TrafficView(StatusModel):
    sent_bytes: int = 0
    """Since the daemon's start."""
    received_bytes: int = 0
    sent_bytes_per_second: float = 0.0
    received_bytes_per_second: float = 0.0
    reachability: str = "unknown"
    quota_bytes: int | None = None
    quota_used_bytes: int = 0


class ContributionView(StatusModel):
    """Counted in applied steps only."""

    microbatches: int = 0
    tokens: int = 0
    steps: int = 0
    credit: float = 0.0
    recent_credit: float = 0.0
    """Average a day, with a half-life of seven days."""
    days: tuple[tuple[str, float], ...] = ()
    """(ISO date, credit), oldest first, without the days that have none."""
    streak_days: int = 0


class StageView(StatusModel):
    stage: int
    peers: int
    microbatches_per_second: float


class PeerView(StatusModel):
    peer: str
    name: str | None = None
    stage: int | None = None
    microbatches_per_second: float = 0.0
    path: str | None = None
    """`direct`, `punched`, `relayed`, `own` for this peer itself, None where there is no link."""
    rtt_seconds: float | None = None
    bytes_per_second: float | None = None


class LeaderboardRow(StatusModel):
    name: str
    """A display name, or the end of a peer ID."""
    team: str | None = None
    tokens: int = 0
    credit: float = 0.0
    you: bool = False


class KnownRun(StatusModel):
    id: str
    name: str
    joined_at: float
    chosen: bool = False


class Status(StatusModel):
    api: int = API_VERSION
    software: str
    pid: int
    time: float
    started_at: float
    state: DaemonState
    reason: SuspendReason | None = None
    sentence: str
    """For people: what happens now, or why nothing does and what ends that."""
    until: float | None = None
    """When it goes on by itself, where that is known."""
    peer: str
    name: str | None = None
    run: RunView | None = None
    runs: tuple[KnownRun, ...] = ()
    devices: tuple[DeviceView, ...] = ()
    machine: MachineView = MachineView()
    traffic: TrafficView = TrafficView()
    contribution: ContributionView = ContributionView()
    stages: tuple[StageView, ...] = ()
    peers: tuple[PeerView, ...] = ()
    leaderboard: tuple[LeaderboardRow, ...] = ()
    away: InterruptionView | None = None
    """None: not since the daemon's start."""


class LogLine(StatusModel):
    time: float
    level: str
    """`event` for the lines that `join` prints; otherwise that of the log."""
    text: str
    number: int
    """Grows by one; a reader asks for what comes after the last one that it has."""
