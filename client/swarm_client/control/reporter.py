"""The status document: what the volunteer and the machine are like now, for people and programs.

Maps, decides nothing. Words and reasons are `word`'s, the machine is `gauges`'. Rates and whether
something is being computed follow from two looks, so that nothing is counted while nobody asks.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass

from swarm_client.control.diary import Diary
from swarm_client.control.documents import (
    DeviceView,
    KnownRun,
    LeaderboardRow,
    MachineView,
    PeerView,
    RunView,
    StageView,
    Status,
    TrafficView,
)
from swarm_client.control.word import Facts, Stopped, say
from swarm_client.printable import printable
from swarm_client.suspension import Suspension
from swarm_client.volunteer import Volunteer
from swarm_shared.messages import LinkPath
from swarm_shared.types import PeerId
from swarm_shared.version import SOFTWARE_VERSION

PEERS_TOLD = 1000
"""Of a larger run, those that this peer has links with, then those of its own stage."""

WORK_SECONDS = 10.0
"""Who has computed within this time is at work: between two microbatches there is a pause."""

RATE_SECONDS = 0.5
"""Between two looks that a rate is taken from; shorter ones say more about the look."""


@dataclass(frozen=True, slots=True)
class DaemonFacts:
    """What the daemon knows beside the volunteer."""

    now: float
    """Unix seconds."""
    moment: float
    """On a clock that never jumps."""
    started_at: float
    peer: str
    name: str | None
    runs: tuple[KnownRun, ...]
    suspension: Suspension | None
    stopped: Stopped
    """Why no run is worked on, when none is."""
    diary: Diary
    machine: MachineView


@dataclass(slots=True)
class _Traffic:
    sent: int = 0
    received: int = 0
    at: float | None = None
    sent_rate: float = 0.0
    received_rate: float = 0.0

    def look(self, sent: int, received: int, now: float) -> None:
        if self.at is None or sent < self.sent or received < self.received:
            self.sent_rate = self.received_rate = 0.0
        elif now - self.at < RATE_SECONDS:
            return
        else:
            self.sent_rate = (sent - self.sent) / (now - self.at)
            self.received_rate = (received - self.received) / (now - self.at)
        self.sent, self.received, self.at = sent, received, now


class Reporter:
    """One per daemon. Volunteers come and go."""

    def __init__(self) -> None:
        self._traffic = _Traffic()
        self._work: tuple[int, object] = (0, None)
        self._worked_at: float | None = None

    def status(self, volunteer: Volunteer | None, facts: DaemonFacts) -> Status:
        saying = say(self._word_facts(volunteer, facts), facts.now)
        today = datetime.datetime.fromtimestamp(facts.now).date()
        return Status(
            software=SOFTWARE_VERSION,
            pid=os.getpid(),
            time=facts.now,
            started_at=facts.started_at,
            word=saying.word,
            reason=saying.reason,
            sentence=saying.sentence,
            until=saying.until,
            peer=facts.peer,
            name=facts.name,
            run=run_view(volunteer),
            runs=facts.runs,
            devices=() if volunteer is None else (device_view(volunteer),),
            machine=facts.machine,
            traffic=self._traffic_view(volunteer, facts.moment),
            contribution=facts.diary.view(today),
            stages=() if volunteer is None else stage_views(volunteer),
            peers=() if volunteer is None else peer_views(volunteer),
            leaderboard=() if volunteer is None else leaderboard(volunteer),
        )

    def _word_facts(self, volunteer: Volunteer | None, facts: DaemonFacts) -> Facts:
        if volunteer is None:
            return Facts(stopped=facts.stopped, suspension=facts.suspension)
        holding, attachment = volunteer.holding, volunteer.attachment
        problem = attachment.problem
        return Facts(
            leaving=attachment.leaving,
            suspension=volunteer.suspended or facts.suspension,
            attached=attachment.session is not None,
            problem=None if problem is None else attachment.explain(problem),
            getting=volunteer.getting,
            stage=None if holding is None else holding.stage,
            working=self._is_working(volunteer, facts.moment),
            waiting_for="" if volunteer.news is None else volunteer.news.waiting_for,
        )

    def _is_working(self, volunteer: Volunteer, now: float) -> bool:
        holding = volunteer.holding
        if holding is None:
            self._worked_at = None
            return False
        work = (volunteer.contribution.steps, holding.seconds_per_microbatch)
        if holding.in_flight or holding.closing or work != self._work:
            self._work, self._worked_at = work, now
        return self._worked_at is not None and now - self._worked_at < WORK_SECONDS

    def _traffic_view(self, volunteer: Volunteer | None, now: float) -> TrafficView:
        if volunteer is None:
            return TrafficView()
        links = volunteer.links()
        self._traffic.look(sum(x.sent for x in links), sum(x.received for x in links), now)
        return TrafficView(
            sent_bytes=self._traffic.sent,
            received_bytes=self._traffic.received,
            sent_bytes_per_second=self._traffic.sent_rate,
            received_bytes_per_second=self._traffic.received_rate,
            reachability=volunteer.traversal.reachability.value,
        )


def run_view(volunteer: Volunteer | None) -> RunView | None:
    if volunteer is None:
        return None
    membership, news, holding = volunteer.membership, volunteer.news, volunteer.holding
    version = 0 if holding is None else holding.version
    return RunView(
        id=volunteer.invite.run_id,
        name="" if membership is None else membership.manifest.name,
        coordinator_attached=volunteer.attachment.session is not None,
        steps=0 if membership is None else membership.manifest.training.steps,
        version=version if news is None else max(version, news.version),
        loss=None if news is None else news.loss,
        tokens_per_second=None if news is None else news.tokens_per_second,
        rebalancing=() if news is None else news.rebalancing,
    )


def device_view(volunteer: Volunteer) -> DeviceView:
    device, holding, getting = volunteer.options.device, volunteer.holding, volunteer.getting
    if holding is not None:
        phase = "averaging" if holding.closing else "serving"
        if volunteer.suspended is not None:
            phase = "paused"
        return DeviceView(
            id=device.name, label=device.label, stage=holding.stage, phase=phase,
            microbatches_per_second=holding.microbatches_per_second, queued=holding.in_flight,
            memory_bytes=device.memory_bytes,
        )  # fmt: skip
    phase = "idle" if getting is None else "downloading"
    return DeviceView(
        id=device.name, label=device.label, stage=getting, phase=phase,
        memory_bytes=device.memory_bytes,
    )  # fmt: skip


def stage_views(volunteer: Volunteer) -> tuple[StageView, ...]:
    """As the roster has it: who holds each stage now."""
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


def peer_views(volunteer: Volunteer) -> tuple[PeerView, ...]:
    paths = {path.remote: path for path in volunteer.node.paths()}
    names = names_of(volunteer)
    own = volunteer.node.peer_id
    holding = volunteer.holding
    mine = None if holding is None else holding.stage
    records = sorted(
        volunteer.roster.all(),
        key=lambda r: (r.peer != own, r.peer not in paths, r.stage != mine, r.stage, r.peer),
    )
    return tuple(
        _peer_view(record.peer, record.stage, record.microbatches_per_second, names, paths, own)
        for record in records[:PEERS_TOLD]
    )


def _peer_view(
    peer: PeerId,
    stage: int,
    rate: float,
    names: Mapping[str, str],
    paths: Mapping[PeerId, LinkPath],
    own: PeerId,
) -> PeerView:
    path = paths.get(peer)
    kind = "own" if peer == own else None
    return PeerView(
        peer=peer, name=names.get(peer), stage=stage, microbatches_per_second=rate,
        path=path.kind.value if path is not None else kind,
        rtt_seconds=None if path is None else path.rtt_seconds,
        bytes_per_second=None if path is None else path.bytes_per_second,
    )  # fmt: skip


def names_of(volunteer: Volunteer) -> dict[str, str]:
    """Public names, as far as the run's news tell them, and this peer's own."""
    rows = () if volunteer.news is None else volunteer.news.leaderboard
    names = {str(row.peer): printable(row.name) for row in rows if row.name}
    if volunteer.options.name:
        names[volunteer.node.peer_id] = volunteer.options.name
    return names


def leaderboard(volunteer: Volunteer) -> tuple[LeaderboardRow, ...]:
    rows = () if volunteer.news is None else volunteer.news.leaderboard
    return tuple(
        LeaderboardRow(
            name=printable(row.name) if row.name else f"…{row.peer[-8:]}",
            team=printable(row.team) if row.team else None, tokens=row.tokens, credit=row.credit,
            you=row.peer == volunteer.node.peer_id,
        )
        for row in rows
    )  # fmt: skip
