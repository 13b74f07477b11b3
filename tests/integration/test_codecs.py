"""A run whose tensors cross in a lossy codec computes what one machine with that codec computes."""

from __future__ import annotations

import pytest

from swarm_shared.protocol import STAGE_PROTOCOL

pytestmark = [pytest.mark.integration, pytest.mark.runs, pytest.mark.timeout(420)]

FRAME_BYTES = 3000
"""More than lengths, header and receipts of one message take."""


def test_int8_in_both_directions_equals_the_reference_and_sends_what_was_promised(
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
    swarm.watch(lambda *_: None)

    history = run.history_at_its_end()
    run.assert_equals_reference()

    stage_of = {peer.peer: stages[peer.name] for peer in history.peers if peer.name in stages}
    sent = {
        (stage_of.get(link.reporter), stage_of.get(link.remote)): link.sent
        for link in history.links
        if link.protocol == STAGE_PROTOCOL
    }
    microbatches = 8 * manifest.training.microbatches_per_step
    evaluated = manifest.training.evaluation_microbatches
    request = manifest.activation_bytes + 4 * manifest.tokens_per_microbatch
    # Not from stage 1 to 0, where trainers send token ids too. What was sent after the last word
    # to the coordinator is missing; in float32 it would be four times as much.
    for border, each in (((0, 1), request), ((1, 2), request), ((2, 1), manifest.gradient_bytes)):
        assert sent[border] >= each * microbatches * 0.75
        assert sent[border] <= (each + FRAME_BYTES) * (microbatches + evaluated) * 1.05


def test_a_lossy_run_equals_the_reference_though_one_is_killed_and_another_joins(make_run) -> None:
    run = make_run(2, steps=12, codecs__activation="int8", codecs__gradient="topk")
    swarm = run.swarm
    invite = swarm.start_coordinator()
    for _ in range(4):
        swarm.start_volunteer(invite)

    run.wait_for_version(4)
    run.kill(swarm.volunteers[0])
    swarm.start_volunteer(invite)
    history = swarm.watch(lambda *_: None)

    assert swarm.wait_for_exit() == []
    assert sum(c.microbatches for c in history.contributions) == 12 * 12 * 2
    run.assert_equals_reference()


def test_a_run_with_bottlenecks_equals_the_reference_though_one_is_killed_and_another_joins(
    make_run,
) -> None:
    run = make_run(
        3, steps=8, model__bottleneck_size=24, model__tie_embeddings=True,
        codecs__activation="int8", codecs__gradient="int8",
    )  # fmt: skip
    swarm, manifest = run.swarm, run.manifest
    assert manifest.activation_bytes == manifest.tokens_per_microbatch * 24 * (1 + 2 / 256)
    invite = swarm.start_coordinator()
    for _ in range(6):
        swarm.start_volunteer(invite)

    run.wait_for_version(3)
    run.kill(swarm.volunteers[0])
    swarm.start_volunteer(invite)
    history = swarm.watch(lambda *_: None)

    assert swarm.wait_for_exit() == []
    assert sum(c.microbatches for c in history.contributions) == 8 * 12 * 3
    run.assert_equals_reference()


def test_with_int8_averages_replicas_are_equal_and_the_run_is_near_its_reference(make_run) -> None:
    """The reference averages nothing: by how much they differ is what the average lost."""
    run = make_run(2, steps=12, codecs__average="int8")
    swarm = run.swarm
    invite = swarm.start_coordinator()
    for number in range(4):
        swarm.start_volunteer(invite, stage=number % 2)
    swarm.watch(lambda *_: None)

    assert swarm.wait_for_exit() == []
    rejected = swarm.status()["figures"]["rejected"]
    assert rejected["other average"] == rejected["other parameters"] == 0
    # In float32 both are below 1e-5.
    assert run.losses() == pytest.approx(run.reference_losses(), rel=1e-2)
    assert 1e-4 < run.parameter_distance(12) < 3e-2
