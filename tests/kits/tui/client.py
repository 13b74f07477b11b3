"""A made-up volunteer, for tests of `swarm-client top`."""

from __future__ import annotations

from typing import Any

from kits.tui import START
from swarm_client.control.status_document import (
    AuditsView,
    ContributionView,
    DaemonState,
    DeviceView,
    LeaderboardRow,
    MachineView,
    OwnVerdict,
    PeerView,
    RunView,
    StageView,
    Status,
    TrafficView,
)

GIB = 2**30


def status(number: int = 0, **changes: Any) -> Status:
    """The daemon's word `number` seconds after the start."""
    told: dict[str, Any] = {
        "software": "0.1.0",
        "pid": 4242,
        "time": START + number,
        "started_at": START - 7200,
        "state": DaemonState.CONTRIBUTING,
        "sentence": "Computing microbatches of stage 1.",
        "peer": "12D3KooWannaanna",
        "name": "anna",
        "run": run(number),
        "devices": (
            DeviceView(
                id="cpu",
                label="4 threads",
                stage=1,
                phase="ready",
                microbatches_per_second=1.25,
                queued=2,
                memory_bytes=4 * GIB,
                memory_used_bytes=GIB,
                utilization=0.83,
                arithmetic="5e0f1a2b",
                state=DaemonState.CONTRIBUTING,
                sentence="Computing microbatches of stage 1.",
            ),
        ),
        "machine": MachineView(
            cpu_share=0.9,
            own_cpu_share=0.7,
            memory_total_bytes=8 * GIB,
            memory_available_bytes=3 * GIB,
            own_memory_bytes=GIB,
            on_batteries=False,
            user_idle_seconds=30.0,
            disk_free_bytes=20_100_000_000,
            disk_used_bytes=350_000_000,
        ),
        "traffic": TrafficView(
            sent_bytes=1_200_000_000,
            received_bytes=800_000_000,
            sent_bytes_per_second=1_250_000.0 + 100_000 * number,
            received_bytes_per_second=900_000.0,
            reachability="public",
            quota_bytes=10_000_000_000,
            quota_used_bytes=2_000_000_000,
        ),
        "contribution": ContributionView(
            microbatches=480,
            tokens=123_456,
            steps=120,
            credit=12.5,
            recent_credit=3.25,
            days=(("2026-09-01", 2.0), ("2026-09-03", 4.0), ("2026-09-04", 6.5)),
            streak_days=2,
        ),
        "audits": AuditsView(
            passed=12, lost=1, to_pass=38,
            verdicts=(OwnVerdict(step=97, reason="what it signed is not what it computes"),),
        ),
        "stages": (
            StageView(stage=0, peers=1, microbatches_per_second=2.0),
            StageView(stage=1, peers=2, microbatches_per_second=2.5),
        ),
        "peers": (
            PeerView(
                peer="12D3KooWannaanna", name="anna", stage=1, microbatches_per_second=1.25,
                path="own",
            ),
            PeerView(
                peer="12D3KooWbertbert", stage=1, microbatches_per_second=1.25, path="relayed",
                rtt_seconds=0.0812, bytes_per_second=45_600.0,
            ),
            PeerView(
                peer="12D3KooWcarlcarl", name="carl \x1b[2J", stage=0, microbatches_per_second=2.0,
                path="direct", rtt_seconds=0.00061, bytes_per_second=1_250_000.0,
            ),
        ),
        "leaderboard": (
            LeaderboardRow(name="carl", team="north", tokens=400_000, credit=40.0),
            LeaderboardRow(name="anna", team="south", tokens=123_456, credit=12.5, you=True),
            LeaderboardRow(name="…bertbert", team="north", tokens=1_000, credit=0.1),
        ),
    }  # fmt: skip
    return Status(**{**told, **changes})


def run(number: int = 0, **changes: Any) -> RunView:
    told: dict[str, Any] = {
        "id": "ab" * 32,
        "name": "my-run",
        "coordinator_attached": True,
        "steps": 500,
        "version": 120 + number,
        "loss": 3.5 - 0.1 * number,
        "tokens_per_second": 1234.0 + number,
        "rebalancing": (
            "bert goes from stage 0 to stage 1: the pipeline gains 12 %, the move costs 3 s",
        ),
    }
    return RunView(**{**told, **changes})
