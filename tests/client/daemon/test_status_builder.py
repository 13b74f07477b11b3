"""What a volunteer's state becomes in the status document. The volunteer is a real one."""

from __future__ import annotations

from pathlib import Path

from client.volunteer.test_volunteer_admission import Scene, certificate, scene
from kits.members import peer_record
from swarm_client.control.contribution_log import ContributionLog
from swarm_client.control.status_document import (
    AuditsView,
    DaemonState,
    OwnVerdict,
    Status,
    SuspendReason,
)
from swarm_client.control.status_sentence import StopCause
from swarm_client.daemon.status_builder import DaemonFacts, StatusBuilder
from swarm_client.governor.governor import Governor
from swarm_client.governor.probes.all import MachineProbes
from swarm_client.governor.probes.readings import Readings
from swarm_client.preferences import PreferenceSource
from swarm_client.volunteer.device_group import DeviceGroup
from swarm_shared.base.types import Step, Version
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import LeaderboardEntry, Roster, RunNews, VerdictNews


def look(s: Scene, builder: StatusBuilder, moment: float = 0.0) -> Status:
    facts = DaemonFacts(
        now=1_000_000.0, moment=moment, started_at=999_000.0, peer=s.volunteer.node.peer_id,
        name=None, runs=(), suspension=None, stopped=StopCause(SuspendReason.NO_RUN),
        contribution_log=ContributionLog(),
        readings=Readings(),
    )  # fmt: skip
    context, bandwidth = s.volunteer.context, s.volunteer.node.bandwidth
    governor = Governor(
        PreferenceSource(context.home.path / "preferences.toml", environment={}), context.home,
        DeviceGroup([s.volunteer]), bandwidth, context.invite.run_id, context.report,
        MachineProbes(context.home.path),
    )  # fmt: skip
    return builder.status(governor, facts)


async def test_the_run_the_peers_and_the_leaderboard_are_reported_as_received(
    tmp_path: Path,
) -> None:
    builder = StatusBuilder()
    async with scene(tmp_path) as s:
        await s.until(lambda: s.volunteer.attachment.session)
        joining = look(s, builder)
        assert (joining.state, joining.reason) == (DaemonState.SYNCING, None)
        assert joining.run is not None
        assert (joining.run.name, joining.run.steps, joining.run.loss) == ("test", 1, None)
        [device] = joining.devices
        assert (device.id, device.stage, device.phase) == ("cpu", None, "idle")

        me, other = s.volunteer.node.peer_id, Identity.generate().peer_id
        others_second = Identity.generate().peer_id
        await s.script.say(
            Roster(
                serial=1,
                peers=tuple(
                    peer_record(
                        peer, certificate=certificate(peer), microbatches_per_second=rate
                    )
                    for peer, rate in ((other, 2.0), (me, 1.5), (others_second, 1.0))
                ),
            )
        )  # fmt: skip
        rows = (
            LeaderboardEntry(
                peer=other, devices=(others_second,), name="B\x1bob", tokens=50, credit=25.0
            ),
            LeaderboardEntry(peer=me, tokens=20, credit=10.0, audits_passed=8, audits_lost=1),
        )
        await s.script.say(
            RunNews(
                version=Version(1),
                loss=2.5,
                tokens_per_second=99.0,
                leaderboard=rows,
                probation_cells=50,
                verdicts=tuple(
                    VerdictNews(step=Step(3), peer=one, owner=one, reason="it \x1b lied")
                    for one in (other, me)
                ),
            )
        )
        await s.until(lambda: s.volunteer.news)
        status = look(s, builder)
        assert status.run is not None
        assert (status.run.version, status.run.loss) == (1, 2.5)
        assert [(x.stage, x.peers, x.microbatches_per_second) for x in status.stages] == [
            (0, 3, 4.5)
        ]
        own, *those = status.peers
        assert {one.peer for one in those} == {other, others_second}
        assert {one.name for one in those} == {"B\N{REPLACEMENT CHARACTER}ob"}
        [peer] = [one for one in those if one.peer == other]
        assert (own.peer, own.path) == (me, "own")
        assert (peer.peer, peer.path, peer.name) == (other, None, "B\N{REPLACEMENT CHARACTER}ob")
        assert [(row.name, row.tokens, row.you) for row in status.leaderboard] == [
            ("B\N{REPLACEMENT CHARACTER}ob", 50, False),
            (f"…{me[-8:]}", 20, True),
        ]
        assert status.audits == AuditsView(
            passed=8, lost=1, to_pass=42,
            verdicts=(OwnVerdict(step=3, reason="it \N{REPLACEMENT CHARACTER} lied"),),
        )  # fmt: skip
        assert Status.model_validate_json(status.model_dump_json()) == status

        s.volunteer.suspend(SuspendReason.TOO_HOT)
        assert (look(s, builder).state, look(s, builder).reason) == (
            DaemonState.PAUSED,
            SuspendReason.TOO_HOT,
        )


async def test_rates_of_traffic_are_between_two_looks(tmp_path: Path) -> None:
    builder = StatusBuilder()
    async with scene(tmp_path) as s:
        await s.until(lambda: s.script.beats)
        first = look(s, builder, 10.0).traffic
        assert first.sent_bytes > 0
        assert first.sent_bytes_per_second == 0.0
        sent = first.sent_bytes
        beats = s.script.beats
        await s.until(lambda: s.script.beats > beats)
        second = look(s, builder, 12.0).traffic
        assert second.sent_bytes_per_second == (second.sent_bytes - sent) / 2.0
        assert second.sent_bytes > sent


async def test_a_coordinator_that_goes_away_is_reported_with_its_reason(tmp_path: Path) -> None:
    builder = StatusBuilder()
    async with scene(tmp_path) as s:
        await s.until(lambda: s.volunteer.attachment.session)
        s.script.refuse = True
        await s.script.streams[-1].reset()
        await s.until(lambda: s.volunteer.attachment.problem)
        status = look(s, builder)
        assert (status.state, status.reason) == (
            DaemonState.DEGRADED,
            SuspendReason.COORDINATOR_AWAY,
        )
        assert status.run is not None
        assert not status.run.coordinator_attached
