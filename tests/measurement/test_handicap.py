"""Handicaps change a volunteer only as the environment asks."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import trio

from benchmarks.instruments.handicap import EQUAL_SHARES_VARIABLE, EqualShares, handicapped
from benchmarks.instruments.pace import PACE_VARIABLE
from kits.manifests import manifest_of
from swarm_client.pipeline import stage_links
from swarm_client.stage.handle.worker_handle import open_worker
from swarm_client.volunteer.gradient_averager import GroupAverager
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.run.manifest import StageRange
from swarm_shared.scheduling.routing import Observation, StageRouting

A, B = PeerId("a"), PeerId("b")
STAGE = StageIndex(0)
SECONDS = 0.5
"""Of a microbatch at the pace of the test."""


def nothing(*peers: PeerId) -> dict[PeerId, int]:
    return dict.fromkeys(peers, 0)


def test_by_equal_shares_a_slow_peer_gets_as_much_and_is_waited_for() -> None:
    routing = EqualShares(random.Random(1), 8)
    routing.update({A: 10.0, B: 0.1})
    routing.observe(A, Observation(0.1), 0.0)
    routing.observe(B, Observation(10.0), 9.0)
    turns = [routing.choose(0.0, nothing(A, B), None) for _ in range(6)]
    assert turns == [A, B] * 3
    assert routing.choose(0.0, nothing(A), None) == A
    assert routing.choose(0.0, nothing(A), None) is None
    assert routing.choose(0.0, nothing(A, B), None) == B
    routing.failed(A, 0.0)
    assert [routing.choose(0.0, nothing(A, B), None) for _ in range(2)] == [B, B]


def test_without_variables_nothing_changes_and_with_them_it_does_within_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(EQUAL_SHARES_VARIABLE, raising=False)
    monkeypatch.delenv(PACE_VARIABLE, raising=False)
    reduce = GroupAverager.reduce
    with handicapped():
        assert (stage_links.StageRouting, GroupAverager.reduce) == (
            StageRouting,
            reduce,
        )
    monkeypatch.setenv(EQUAL_SHARES_VARIABLE, "1")
    with handicapped():
        assert stage_links.StageRouting is EqualShares
        assert GroupAverager.reduce is not reduce
    assert stage_links.StageRouting is StageRouting
    assert GroupAverager.reduce is reduce


@pytest.mark.process
def test_a_paced_worker_takes_the_time_of_its_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"hidden_size": 32, "heads": 4, "key_value_heads": 2, "sequence_length": 16}
    stages = (StageRange(first_layer=0, end_layer=1, work_flops=1000),)
    manifest = manifest_of(model=model, stages=stages)
    monkeypatch.setenv(PACE_VARIABLE, repr(manifest.stages[STAGE].work_flops / SECONDS))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    tokens = bytes(2 * 16 * 4)

    async def main() -> None:
        with trio.fail_after(60), handicapped():
            async with open_worker(
                manifest, STAGE, "cpu", 1, 2**20, f"test-paced-{time.time_ns()}", tmp_path / "log"
            ) as worker:
                with await worker.forward(Step(1), MicrobatchIndex(0), True, [tokens, tokens]) as o:
                    assert o.seconds >= SECONDS

    trio.run(main)
