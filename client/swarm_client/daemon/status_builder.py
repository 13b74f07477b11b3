"""Builds the status document: the state of the daemon, its volunteers and the machine.

Maps, decides nothing. Sentences and reasons are `swarm_client.control.status_sentence`'s and the
governor's; readings come from `swarm_client.governor.probes`. Rates, and whether a device is
computing, follow from two successive calls, so no figure is kept while no client requests the
status.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from swarm_client.control.contribution_log import ContributionLog
from swarm_client.control.status_document import (
    AuditsView,
    DeviceView,
    EvaluationView,
    InterruptionView,
    KnownRun,
    LeaderboardRow,
    MachineView,
    OwnVerdict,
    PeerView,
    RunView,
    StageView,
    Status,
    SuspendReason,
    TrafficView,
)
from swarm_client.control.status_sentence import (
    StateDescription,
    StatusFacts,
    StopCause,
    Suspension,
    combine_devices,
    describe,
)
from swarm_client.daemon.sleep_watch import SHOWN_SECONDS
from swarm_client.governor.governor import Governor
from swarm_client.governor.probes.readings import Readings
from swarm_client.machine.device_names import number_of
from swarm_client.volunteer.device_group import DeviceGroup
from swarm_client.volunteer.volunteer import Volunteer
from swarm_shared import SOFTWARE_VERSION
from swarm_shared.base.errors import AdmissionError, SwarmError
from swarm_shared.base.text import printable
from swarm_shared.base.types import PeerId

MAX_LISTED_PEERS = 1000
"""Maximum number of peers listed. Of a larger run: those with a link to this peer, then those of
its own stage."""

RECENT_WORK_SECONDS = 10.0
"""Seconds after a computation for which a device counts as computing: there are pauses between
microbatches."""

MIN_RATE_SECONDS = 0.5
"""Shortest interval from which a rate is computed; shorter ones are dominated by timing noise."""


@dataclass(frozen=True, slots=True)
class DaemonFacts:
    """The part of a status that the daemon knows without a volunteer."""

    now: float
    """Unix seconds."""
    moment: float
    """Seconds of a monotonic clock."""
    started_at: float
    peer: str
    name: str | None
    runs: tuple[KnownRun, ...]
    suspension: Suspension | None
    stopped: StopCause
    """The reason why no run is worked on; it is shown when none is."""
    contribution_log: ContributionLog
    readings: Readings
    interruption: InterruptionView | None = None


@dataclass(slots=True)
class _Activity:
    """The last observed work of a device, and when it last changed."""

    done: tuple[int, object]
    at: float | None = None


@dataclass(slots=True)
class _Traffic:
    sent: int = 0
    received: int = 0
    at: float | None = None
    sent_rate: float = 0.0
    received_rate: float = 0.0

    def update(self, sent: int, received: int, now: float) -> None:
        """Take new totals in bytes at the time `now`, in seconds, and compute the rates since the
        previous ones."""
        if self.at is None or sent < self.sent or received < self.received:
            self.sent_rate = self.received_rate = 0.0
        elif now - self.at < MIN_RATE_SECONDS:
            return
        else:
            self.sent_rate = (sent - self.sent) / (now - self.at)
            self.received_rate = (received - self.received) / (now - self.at)
        self.sent, self.received, self.at = sent, received, now


class StatusBuilder:
    """Makes the status of one daemon. It remembers traffic and work between two statuses, while
    volunteers come and go."""

    def __init__(self) -> None:
        self._traffic = _Traffic()
        self._activities: dict[PeerId, _Activity] = {}

    def status(self, governor: Governor | None, facts: DaemonFacts) -> Status:
        """Return the status; `governor` is None while no run is worked on."""
        if governor is None:
            stopped = StatusFacts(stopped=facts.stopped, suspension=facts.suspension)
            described = describe(stopped, facts.now)
            of_run: dict[str, Any] = {}
        else:
            devices = tuple(self._devices(governor, facts))
            described = combine_devices(devices)
            device_group = governor.device_group
            reporting_device = device_group.reporting_device
            of_run = {
                "devices": devices, "traffic": self._traffic_view(governor, facts.moment),
                "run": run_view(reporting_device), "stages": stage_views(reporting_device),
                "peers": peer_views(device_group), "leaderboard": leaderboard(device_group),
                "audits": audits(device_group),
            }  # fmt: skip
        today = datetime.datetime.fromtimestamp(facts.now).date()
        return Status(
            software=SOFTWARE_VERSION,
            pid=os.getpid(),
            time=facts.now,
            started_at=facts.started_at,
            **asdict(described),
            peer=facts.peer,
            name=facts.name,
            runs=facts.runs,
            machine=machine_view(
                facts.readings, None if governor is None else governor.user_idle_seconds()
            ),
            contribution=facts.contribution_log.view(today),
            away=facts.interruption,
            **of_run,
        )

    def _devices(self, governor: Governor, facts: DaemonFacts) -> Iterator[DeviceView]:
        for volunteer in governor.device_group.volunteers:
            failure = governor.device_group.failures.get(volunteer.node.peer_id)
            if failure is None:
                described = describe(self._device_facts(volunteer, facts), facts.now)
            else:
                stopped = StatusFacts(stopped=stopped_by(failure))
                described = describe(stopped, facts.now)
            yield governed_device_view(device_view(volunteer, described), governor)

    def _device_facts(self, volunteer: Volunteer, facts: DaemonFacts) -> StatusFacts:
        holding, interruption = volunteer.holding, facts.interruption
        attachment = volunteer.attachment
        problem = attachment.problem
        recent = interruption is not None and (
            facts.now < interruption.began + interruption.seconds + SHOWN_SECONDS
        )
        return StatusFacts(
            leaving=attachment.leaving,
            suspension=volunteer.suspended or facts.suspension,
            attached=attachment.attached,
            problem=None if problem is None else attachment.explain(problem),
            loading_stage=volunteer.loading_stage,
            stage=None if holding is None else holding.stage,
            working=self._is_working(volunteer, facts.moment),
            downloads=tuple(str(download) for download in volunteer.downloads),
            waiting_for="" if volunteer.news is None else volunteer.news.waiting_for,
            away=interruption.sentence if interruption is not None and recent else "",
        )

    def _is_working(self, volunteer: Volunteer, now: float) -> bool:
        holding, peer = volunteer.holding, volunteer.node.peer_id
        if holding is None:
            self._activities.pop(peer, None)
            return False
        done = (holding.version, holding.meter.seconds_per_microbatch)
        work = self._activities.setdefault(peer, _Activity((holding.version, None)))
        if holding.in_flight or holding.owed or holding.account.closing or done != work.done:
            work.done, work.at = done, now
        return work.at is not None and now - work.at < RECENT_WORK_SECONDS

    def _traffic_view(self, governor: Governor, now: float) -> TrafficView:
        device_group, decision = governor.device_group, governor.decision
        links = [link for volunteer in device_group.volunteers for link in volunteer.links()]
        self._traffic.update(sum(x.sent for x in links), sum(x.received for x in links), now)
        return TrafficView(
            sent_bytes=self._traffic.sent,
            received_bytes=self._traffic.received,
            sent_bytes_per_second=self._traffic.sent_rate,
            received_bytes_per_second=self._traffic.received_rate,
            reachability=device_group.reporting_device.relay_policy.reachability.value,
            quota_bytes=decision.limits.quota_bytes,
            quota_used_bytes=decision.quota_used_bytes,
        )


def machine_view(readings: Readings, user_idle_seconds: float | None) -> MachineView:
    """The readings of this machine that could be read; the others keep their defaults."""
    read = {name: getattr(readings, name) for name in MachineView.model_fields}
    readable = {name: value for name, value in read.items() if value is not None}
    return MachineView(**readable | {"user_idle_seconds": user_idle_seconds})


def governed_device_view(view: DeviceView, governor: Governor) -> DeviceView:
    """The view with the readings of its device, and with the governor's reason for a pause."""
    decision, is_governors_pause = governor.device_decision(view.id)
    readings, index = governor.readings, number_of(view.id)
    changes: dict[str, object] = {"duty_cycle": decision.limits.duty_cycle}
    if is_governors_pause and view.reason is decision.reason:
        changes |= {"sentence": f"paused: {decision.sentence}", "until": decision.until}
    if index is None:
        changes |= {
            "utilization": readings.own_cpu_share,
            "memory_used_bytes": readings.own_memory_bytes,
        }
    elif (gpu := readings.gpu(index)) is not None:
        changes |= {
            "utilization": gpu.utilization,
            "memory_used_bytes": gpu.memory_used_bytes,
            "temperature_celsius": gpu.temperature_celsius,
        }
    return view.model_copy(update=changes)


def run_view(volunteer: Volunteer) -> RunView:
    """The run as a volunteer knows it: from its manifest, and from the latest run summary."""
    membership, news, holding = volunteer.membership, volunteer.news, volunteer.holding
    version = 0 if holding is None else holding.version
    return RunView(
        id=volunteer.context.invite.run_id,
        name="" if membership is None else membership.manifest.name,
        coordinator_attached=volunteer.attachment.attached,
        steps=0 if membership is None else membership.manifest.training.steps,
        version=version if news is None else max(version, news.version),
        loss=None if news is None else news.loss,
        tokens_per_second=None if news is None else news.tokens_per_second,
        evaluation=None
        if news is None or news.evaluation is None
        else EvaluationView.model_validate(news.evaluation.model_dump()),
        rebalancing=() if news is None else news.rebalancing,
    )


def stopped_by(error: SwarmError) -> StopCause:
    """Return the reason why no run is worked on after an error."""
    refused = isinstance(error, AdmissionError)
    reason = SuspendReason.NOT_ADMITTED if refused else SuspendReason.NO_RUN
    return StopCause(reason, str(error))


def device_view(volunteer: Volunteer, described: StateDescription) -> DeviceView:
    """One device: its state in the run, its stage, and the rate of its work."""
    device, holding = volunteer.context.options.device, volunteer.holding
    if holding is not None:
        stage: int | None = holding.stage
        phase = "averaging" if holding.account.closing else "serving"
        phase = phase if volunteer.suspended is None else "paused"
    else:
        stage = volunteer.loading_stage
        phase = "idle" if stage is None else "downloading" if volunteer.downloads else "loading"
    return DeviceView(
        id=device.id, label=device.label, memory_bytes=device.memory_bytes,
        peer=volunteer.node.peer_id, **asdict(described),
        stage=stage, phase=phase, downloads=volunteer.downloads,
        arithmetic=None if holding is None else holding.worker.configured.arithmetic,
        queued=0 if holding is None else holding.in_flight,
        microbatches_per_second=0 if holding is None else holding.meter.microbatches_per_second,
    )  # fmt: skip


def stage_views(volunteer: Volunteer) -> tuple[StageView, ...]:
    """Number of peers and rate of each stage, from the roster."""
    if volunteer.membership is None:
        return ()
    peers: dict[int, int] = dict.fromkeys(range(volunteer.membership.manifest.stage_count), 0)
    rates = dict.fromkeys(peers, 0.0)
    for record in volunteer.roster.all():
        if record.stage in peers:
            peers[record.stage] += 1
            rates[record.stage] += record.microbatches_per_second
    return tuple(
        StageView(stage=stage, peers=count, microbatches_per_second=rates[stage])
        for stage, count in peers.items()
    )


def own_peers(device_group: DeviceGroup) -> frozenset[PeerId]:
    """The peer IDs of this machine's devices."""
    return frozenset(volunteer.node.peer_id for volunteer in device_group.volunteers)


def peer_views(device_group: DeviceGroup) -> tuple[PeerView, ...]:
    """The members of the run, those first that are closest to this machine: its own, linked ones,
    those of its stages."""
    # Several devices may have links to the same peer; one of them is listed.
    paths = {path.remote: path for v in device_group.volunteers for path in v.node.paths()}
    names, own = names_of(device_group), own_peers(device_group)
    holdings = [volunteer.holding for volunteer in device_group.volunteers]
    own_stages = {holding.stage for holding in holdings if holding is not None}
    records = sorted(
        device_group.reporting_device.roster.all(),
        key=lambda r: (
            r.peer not in own, r.peer not in paths, r.stage not in own_stages, r.stage, r.peer
        ),
    )  # fmt: skip
    views: list[PeerView] = []
    for record in records[:MAX_LISTED_PEERS]:
        path = None if record.peer in own else paths.get(record.peer)
        kind = "own" if record.peer in own else None
        views.append(
            PeerView(
                peer=record.peer, name=names.get(record.peer), stage=record.stage,
                microbatches_per_second=record.microbatches_per_second,
                path=path.kind.value if path is not None else kind,
                rtt_seconds=None if path is None else path.rtt_seconds,
                bytes_per_second=None if path is None else path.bytes_per_second,
            )
        )  # fmt: skip
    return tuple(views)


def names_of(device_group: DeviceGroup) -> dict[str, str]:
    """Public names from the run summary's leaderboard, and this machine's own."""
    news = device_group.reporting_device.news
    rows = () if news is None else news.leaderboard
    names = {
        str(peer): printable(row.name)
        for row in rows if row.name
        for peer in (row.peer, *row.devices)
    }  # fmt: skip
    for volunteer in device_group.volunteers:
        if volunteer.context.options.name:
            names[volunteer.node.peer_id] = volunteer.context.options.name
    return names


def audits(device_group: DeviceGroup) -> AuditsView | None:
    """The standing of the owner of these devices: that of the row which has one of them."""
    news, own = device_group.reporting_device.news, own_peers(device_group)
    if news is None:
        return None
    row = next((r for r in news.leaderboard if own & {r.peer, *r.devices}), None)
    lost = [v for v in news.verdicts if v.peer in own or (row is not None and v.owner == row.peer)]
    if row is None and not lost:
        return None
    passed = 0 if row is None else row.audits_passed
    return AuditsView(
        passed=passed,
        lost=len(lost) if row is None else row.audits_lost,
        to_pass=max(0, news.probation_cells - passed),
        verdicts=tuple(OwnVerdict(step=v.step, reason=printable(v.reason)) for v in lost),
    )


def leaderboard(device_group: DeviceGroup) -> tuple[LeaderboardRow, ...]:
    """The leaderboard of the latest run summary, with this machine's row marked."""
    news, own = device_group.reporting_device.news, own_peers(device_group)
    rows = () if news is None else news.leaderboard
    return tuple(
        LeaderboardRow(
            name=printable(row.name) if row.name else f"…{row.peer[-8:]}",
            team=printable(row.team) if row.team else None, tokens=row.tokens, credit=row.credit,
            you=row.peer in own,
        )
        for row in rows
    )  # fmt: skip
