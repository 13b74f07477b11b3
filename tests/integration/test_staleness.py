"""Runs whose gradients are one version late compute what one machine with that delay computes."""

from __future__ import annotations

import pytest

from kits.runs.real_run import reference

pytestmark = [pytest.mark.integration, pytest.mark.runs, pytest.mark.timeout(420)]


def test_a_late_run_equals_the_reference_and_differs_from_one_that_is_not_late(make_run) -> None:
    run = make_run(3, steps=6, training__staleness=1, limits__starting_peers_per_stage=1)
    swarm = run.swarm
    invite = swarm.start_coordinator()
    for stage in range(3):
        swarm.start_volunteer(invite, stage=stage)
    swarm.watch(lambda *_: None)

    assert swarm.wait_for_exit() == []
    run.assert_equals_reference()
    training = run.manifest.training.model_copy(update={"staleness": 0})
    prompt = run.manifest.model_copy(update={"training": training})
    not_late = reference(prompt.model_dump_json(), str(run.folder.data)).losses
    # The first two steps are taken at the initial parameters, and the first one always is.
    assert run.losses()[0] == pytest.approx(not_late[0], rel=1e-4)
    assert run.losses()[1:] != pytest.approx(not_late[1:], rel=1e-3)


def test_a_late_run_equals_the_reference_though_peers_die_join_and_the_coordinator_comes_back(
    make_run,
) -> None:
    run = make_run(2, steps=16, training__staleness=1, checkpoint__every_steps=4)
    swarm = run.swarm
    invite = swarm.start_coordinator()
    for _ in range(4):
        swarm.start_volunteer(invite)

    run.wait_for_version(4)
    run.kill(swarm.volunteers[0])
    swarm.start_volunteer(invite)
    run.wait_for_version(8)
    assert swarm.coordinator is not None
    run.kill(swarm.coordinator)
    swarm.coordinator.wait(30.0)
    swarm.start_coordinator()
    history = swarm.watch(lambda *_: None)

    assert swarm.wait_for_exit() == []
    assert sum(c.microbatches for c in history.contributions) == 16 * 12 * 2
    run.assert_equals_reference()
