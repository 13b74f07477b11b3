"""The benchmark of the coordinator: its volunteers train by the rules that ship, and every message
that they send is among the latencies."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

import swarm_coordinator.server.coordinator as server
from benchmarks.coordinator.__main__ import Fleet, make_run, serving
from benchmarks.coordinator.dedicated_clock import DedicatedCoreClock
from benchmarks.coordinator.volunteers import World
from swarm_coordinator.run_dir.sampled_tokens import RunTokens
from swarm_shared.identity.signed_manifest import run_id_of

pytestmark = pytest.mark.process

VOLUNTEERS = 12
STAGES = 3
MICROBATCHES = 8


def test_steps_are_applied_while_a_volunteer_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The benchmark replaces it.
    monkeypatch.setattr(server, "transition", server.transition)
    clock = DedicatedCoreClock()
    trio.run(_train, tmp_path, clock, clock=clock)


async def _train(folder: Path, clock: DedicatedCoreClock) -> None:
    manifest = make_run(folder, VOLUNTEERS, STAGES, MICROBATCHES)
    async with serving(folder, manifest, clock.current_time) as served:
        tokens = RunTokens(manifest, folder / "run" / "data")
        world = World(run_id_of(manifest), manifest, 0.5, clock, VOLUNTEERS, tokens)
        fleet = Fleet(served, world, clock)
        await fleet.join_all(VOLUNTEERS)
        await _until_applied(world, 1)
        fleet.everybody[0].die()
        await _until_applied(world, 2)

    sent_to = {stage for peer in world.peers.values() for stage in peer.downstreams}
    assert sent_to == set(range(STAGES))
    kinds = {kind for _, _, kind in served.latencies.found}
    assert kinds >= {
        "LeaseResolved", "ReceiptsVerified", "SumsStated", "applied", "heartbeat", "round_report",
    }  # fmt: skip
    assert world.refused == 0


async def _until_applied(world: World, version: int) -> None:
    while world.applied < version:
        await trio.sleep(0.05)
