"""How long showing what was computed takes over the slowest uplink."""

from __future__ import annotations

from pathlib import Path

import pytest

from kits.client.stage_runners import STEP, make_manifest, runners_of, through
from swarm_client.stage.protocol.gradient_blocks import block_count, block_range, sampled_blocks
from swarm_client.stage.protocol.slot_sizes import GRADIENT_ELEMENT_BYTES
from swarm_client.stage.worker.audits import AuditRunner
from swarm_coordinator.core.trust.showing import (
    AVERAGE_SHARE,
    SLOW_UPLINK_BYTES_PER_SECOND,
    showing_seconds,
    shown_bytes,
)
from swarm_shared.base.transcript import GRADIENT_BLOCK_BYTES, KeptTensors
from swarm_shared.base.types import MicrobatchIndex, StageIndex
from swarm_shared.run.model_config import ComputeDtype
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes

MICROBATCH = MicrobatchIndex(5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wide", [False, True])
def test_the_bytes_are_those_of_what_a_worker_shows(
    tmp_path: Path, dtype: ComputeDtype, wide: bool
) -> None:
    manifest = make_manifest(3, dtype)
    if wide:
        model = manifest.model.model_copy(update={"hidden_size": 64, "intermediate_size": 30_000})
        manifest = manifest.model_copy(update={"model": model})
    runners = runners_of(manifest)
    through(runners, MICROBATCH)
    for stage, runner in enumerate(runners):
        if runner.accumulator.contents.kept(MICROBATCH) is None:
            runner.count_weights(MICROBATCH + 1)
        elements = runner.layout.own_count + runner.layout.tied_count
        blocks = sampled_blocks("5eed" * 8, elements * GRADIENT_ELEMENT_BYTES)
        shown = tmp_path / "shown"
        AuditRunner(runner).save_kept(STEP, MICROBATCH, shown, KeptTensors.COMPUTED, blocks)
        last = block_count(elements * GRADIENT_ELEMENT_BYTES) - 1
        place = block_range(last, elements * GRADIENT_ELEMENT_BYTES)
        lacking = GRADIENT_BLOCK_BYTES - len(place) if last in blocks else 0
        assert shown.stat().st_size == shown_bytes(manifest, StageIndex(stage)) - lacking


@pytest.mark.parametrize("averaging_seconds", [0.0, 1e6])
def test_without_fast_averages_a_slow_homes_uplink_is_the_slowest(averaging_seconds: float) -> None:
    manifest = make_manifest(3)
    seconds = showing_seconds(manifest, StageIndex(1), averaging_seconds)
    expected = shown_bytes(manifest, StageIndex(1)) / SLOW_UPLINK_BYTES_PER_SECOND
    assert seconds == expected


def test_a_member_of_fast_averages_sends_as_fast_as_they_take() -> None:
    manifest, averaging_seconds = make_manifest(3), 1e-4
    stage = StageIndex(1)
    uplink = AVERAGE_SHARE * stage_sizes(manifest)[stage].gradient_bytes / averaging_seconds
    assert uplink > SLOW_UPLINK_BYTES_PER_SECOND
    seconds = showing_seconds(manifest, stage, averaging_seconds)
    assert seconds == shown_bytes(manifest, stage) / uplink
