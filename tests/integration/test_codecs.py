"""Runs with lossy codecs, compared with one process that uses the same codecs."""

from __future__ import annotations

import pytest

from swarm_shared.protocol import STAGE_PROTOCOL

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(420)]

FRAME_BYTES = 3000
"""Upper bound of lengths, header and receipts of one message."""


def test_int8_in_both_directions_equals_the_reference_and_sends_as_few_bytes_as_planned(
    make_run,
) -> None:
    run = make_run(
        3, steps=8, codecs__activation="int8", codecs__gradient="int8",
        limits__starting_peers_per_stage=1,
    )  # fmt: skip
    swarm, manifest = run.swarm, run.manifest
    values = manifest.tokens_per_microbatch * manifest.model.hidden_size
    assert manifest.activation_bytes == manifest.gradient_bytes == values * (1 + 2 / 256)
    invite = swarm.start_coordinator()
    stages = {swarm.start_volunteer(invite, stage=stage).name: stage for stage in range(3)}
    swarm.watch()

    history = run.history_at_its_end()
    run.assert_equals_reference()

    stage_of = {peer: stages[name] for peer, name in history.names.items() if name in stages}
    sent = {
        (stage_of.get(link.reporter), stage_of.get(link.remote)): link.sent
        for link in history.links
        if link.protocol == STAGE_PROTOCOL
    }
    microbatches = 8 * manifest.training.microbatches_per_step
    evaluated = manifest.training.evaluation_microbatches
    request = manifest.activation_bytes + 4 * manifest.tokens_per_microbatch
    # Without stage 1 to 0, where trainers also send token ids. Bytes after the last report to the
    # coordinator are missing. In float32 it would be four times as much.
    for boundary, each in (((0, 1), request), ((1, 2), request), ((2, 1), manifest.gradient_bytes)):
        assert sent[boundary] >= each * microbatches * 0.75
        assert sent[boundary] <= (each + FRAME_BYTES) * (microbatches + evaluated) * 1.05


def test_topk_gradients_equal_the_reference_through_a_death_and_a_join(make_run) -> None:
    run = make_run(2, steps=12, codecs__activation="int8", codecs__gradient="topk")
    swarm = run.swarm
    invite = swarm.start_coordinator()
    for _ in range(4):
        swarm.start_volunteer(invite)

    run.wait_for_version(4)
    run.kill(swarm.volunteers[0])
    swarm.start_volunteer(invite)
    history = swarm.watch()

    assert swarm.wait_for_exit() == []
    assert sum(c.microbatches for c in history.contributions) == 12 * 12 * 2
    run.assert_equals_reference()


def test_int8_averages_leave_replicas_equal_and_the_run_near_its_reference(make_run) -> None:
    """The reference averages nothing, so that the difference is the loss of the codec."""
    run = make_run(2, steps=12, codecs__average="int8")
    swarm = run.swarm
    invite = swarm.start_coordinator()
    for number in range(4):
        swarm.start_volunteer(invite, stage=number % 2)
    swarm.watch()

    assert swarm.wait_for_exit() == []
    rejected = swarm.status()["figures"]["rejected"]
    assert rejected["other average"] == rejected["other parameters"] == 0
    # In float32 both are below 1e-5.
    assert run.losses() == pytest.approx(run.reference_losses(), rel=1e-2)
    assert 1e-4 < run.parameter_distance(12) < 3e-2
