"""The status document of a daemon, and the lines of its log.

Owns the form that `swarm-client status --json` prints and `swarm-client top` draws. Free of trio,
torch and libp2p, so that a view starts quickly. Times are Unix seconds unless the name says
otherwise; rates are per second. A newer daemon may add fields, and readers ignore fields they do
not know; a field's meaning never changes without a new `API_VERSION`.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from swarm_client.control.reasons import DaemonState as DaemonState
from swarm_client.control.reasons import SuspendReason as SuspendReason
from swarm_shared.transfer.download_meter import DownloadProgress

API_VERSION = 1


class ControlModel(BaseModel):
    """Base of the documents: immutable; unknown keys of a newer daemon are ignored."""

    # Built at first use, which for a view is after its first frame.
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class EvaluationView(ControlModel):
    """The organiser's evaluation of a checkpoint."""

    version: int
    heldout_loss: float | None = None
    """Nats per held-out token."""
    sample: str = ""
    """The beginning of a text that the model has written."""


class RunView(ControlModel):
    """The current run, as far as this peer has received it."""

    id: str
    name: str
    coordinator_attached: bool
    steps: int
    version: int
    """Applied steps."""
    loss: float | None = None
    """Nats per token in the last applied step."""
    tokens_per_second: float | None = None
    evaluation: EvaluationView | None = None
    rebalancing: tuple[str, ...] = ()
    """The newest decisions, one sentence each, oldest first."""


class DeviceView(ControlModel):
    id: str
    """The device's name (`swarm_client.machine.device_names`); cpu#2 for the second volunteer on
    the same device."""
    label: str
    stage: int | None = None
    phase: str = "idle"
    microbatches_per_second: float = 0.0
    queued: int = 0
    downloads: tuple[DownloadProgress, ...] = ()
    memory_bytes: int = 0
    """Memory offered to the run."""
    memory_used_bytes: int | None = None
    utilization: float | None = None
    """0 to 1; None when it cannot be read."""
    temperature_celsius: float | None = None
    duty_cycle: float = 1.0
    """Fraction of the time that the device may compute, by the preferences."""
    arithmetic: str | None = None
    """The class of its arithmetic: devices of one class compute alike, to the bit. None without a
    stage."""
    peer: str = ""
    """Its peer ID: each device is a member of the run in its own right."""
    state: DaemonState
    reason: SuspendReason | None = None
    sentence: str
    """`state`, `reason`, `sentence` and `until` as in `Status`, for this device."""
    until: float | None = None


class InterruptionView(ControlModel):
    """The last time that this program was interrupted while in its run."""

    began: float
    """Unix seconds."""
    seconds: float
    slept: bool
    """Whether the machine slept; otherwise only this program was stopped."""
    sentence: str


class MachineView(ControlModel):
    cpu_share: float | None = None
    """Share of all cores, by all programs, 0 to 1."""
    own_cpu_share: float | None = None
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    own_memory_bytes: int = 0
    on_batteries: bool | None = None
    user_idle_seconds: float | None = None
    disk_free_bytes: int = 0
    disk_used_bytes: int = 0
    """Bytes that this program's home takes."""


class TrafficView(ControlModel):
    sent_bytes: int = 0
    """Bytes sent since the daemon's start."""
    received_bytes: int = 0
    sent_bytes_per_second: float = 0.0
    received_bytes_per_second: float = 0.0
    reachability: str = "unknown"
    quota_bytes: int | None = None
    quota_used_bytes: int = 0


class ContributionView(ControlModel):
    """What this machine has contributed, counted in applied steps only."""

    microbatches: int = 0
    tokens: int = 0
    steps: int = 0
    credit: float = 0.0
    recent_credit: float = 0.0
    """Average credit per day, with a half-life of seven days."""
    days: tuple[tuple[str, float], ...] = ()
    """(ISO date, credit), oldest first, without days that have none."""
    streak_days: int = 0


class OwnVerdict(ControlModel):
    """An audit that a device of this owner has lost."""

    step: int
    reason: str


class AuditsView(ControlModel):
    """The audits of this owner, as far as the coordinator has sent their results."""

    passed: int = 0
    """Microbatches that another owner has computed again with the same result, since the last lost
    audit."""
    lost: int = 0
    to_pass: int = 0
    """Audits that must still pass before the owner is established."""
    verdicts: tuple[OwnVerdict, ...] = ()
    """This owner's part of the newest lost audits of the run, oldest first."""


class StageView(ControlModel):
    stage: int
    peers: int
    microbatches_per_second: float


class PeerView(ControlModel):
    peer: str
    name: str | None = None
    stage: int | None = None
    microbatches_per_second: float = 0.0
    path: str | None = None
    """`direct`, `punched`, `relayed`, `own` for this peer itself, None where there is no link."""
    rtt_seconds: float | None = None
    bytes_per_second: float | None = None


class LeaderboardRow(ControlModel):
    name: str
    """A display name, or the end of a peer ID."""
    team: str | None = None
    tokens: int = 0
    credit: float = 0.0
    you: bool = False


class KnownRun(ControlModel):
    id: str
    name: str
    joined_at: float
    chosen: bool = False


class Status(ControlModel):
    api: int = API_VERSION
    software: str
    pid: int
    time: float
    started_at: float
    state: DaemonState
    reason: SuspendReason | None = None
    sentence: str
    """For people: what happens now, or why nothing happens and what ends that."""
    until: float | None = None
    """The time at which it continues by itself, in Unix seconds, where that is known."""
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
    audits: AuditsView | None = None
    """The standing of this owner; None if it is not among those that the coordinator sends."""
    away: InterruptionView | None = None
    """The last interruption; None if there was none since the daemon's start."""


class LogLine(ControlModel):
    time: float
    level: str
    """`event` for the lines that `join` prints; otherwise the level of the log record."""
    text: str
    number: int
    """Increases by one per line; a reader requests the lines after the last one it has."""
