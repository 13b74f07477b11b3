"""Runs whose gradients are counted are their reference, to the bit, whatever happens to them."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.runs, pytest.mark.timeout(420)]


def test_a_run_is_its_reference_to_the_bit_though_peers_die_join_and_the_coordinator_comes_back(
    make_run,
) -> None:
    run = make_run(2, steps=16, codecs__average="exact", checkpoint__every_steps=4)
    swarm = run.swarm
    invite = swarm.start_coordinator()
    for _ in range(4):
        swarm.start_volunteer(invite)

    run.wait_for_version(3)
    run.kill(swarm.volunteers[0])
    swarm.start_volunteer(invite)
    run.wait_for_version(7)
    assert swarm.coordinator is not None
    run.kill(swarm.coordinator)
    swarm.coordinator.wait(30.0)
    swarm.start_coordinator()
    run.wait_for_version(11)
    run.kill(swarm.volunteers[1])
    history = swarm.watch(lambda *_: None)

    assert swarm.wait_for_exit() == []
    assert sum(c.microbatches for c in history.contributions) == 16 * 12 * 2
    run.assert_equals_reference()


def test_with_int8_between_stages_and_late_gradients_it_still_is(make_run) -> None:
    run = make_run(
        3, steps=10, codecs__average="exact", codecs__activation="int8", codecs__gradient="int8",
        training__staleness=1,
    )  # fmt: skip
    swarm = run.swarm
    invite = swarm.start_coordinator()
    for number in range(6):
        swarm.start_volunteer(invite, stage=number % 3)

    run.wait_for_version(3)
    run.kill(swarm.volunteers[4])
    swarm.start_volunteer(invite)
    swarm.watch(lambda *_: None)

    assert swarm.wait_for_exit() == []
    run.assert_equals_reference()
