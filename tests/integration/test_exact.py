"""Real runs under churn have the losses and parameters of one process, bit for bit."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(420)


def test_deaths_a_join_and_a_coordinator_restart_change_no_bit(make_run) -> None:
    """Not marked `process` on purpose: every `make test` contains one whole run."""
    run = make_run(2, steps=16, codecs__average="exact", checkpoint__every_steps=4)
    swarm = run.swarm
    invite = swarm.start_coordinator()
    for _ in range(4):
        swarm.start_volunteer(invite)

    run.wait_for_version(3)
    run.kill(swarm.volunteers[0])
    swarm.start_volunteer(invite)
    run.wait_for_version(7)
    before = run.restart_coordinator(invite)
    run.wait_for_version(11)
    run.kill(swarm.volunteers[1])
    history = swarm.watch(lambda *_: None)

    assert swarm.wait_for_exit() == []
    assert run.losses()[: len(before)] == before  # no acknowledged step was lost
    assert history.restored.generation == 2
    assert sum(c.microbatches for c in history.contributions) == 16 * 12 * 2
    run.assert_equals_reference()


@pytest.mark.process
def test_int8_staleness_tied_embeddings_and_bottlenecks_under_churn_change_no_bit(
    make_run,
) -> None:
    """Everything at once that changes what crosses a stage boundary or a step."""
    run = make_run(
        3, steps=12, codecs__average="exact", codecs__activation="int8", codecs__gradient="int8",
        model__tie_embeddings=True, model__bottleneck_size=24, training__staleness=1,
        checkpoint__every_steps=4,
    )  # fmt: skip
    swarm = run.swarm
    invite = swarm.start_coordinator()
    for number in range(6):
        swarm.start_volunteer(invite, stage=number % 3)

    run.wait_for_version(3)
    run.kill(swarm.volunteers[4])
    swarm.start_volunteer(invite)
    run.wait_for_version(6)
    run.restart_coordinator(invite)
    history = swarm.watch(lambda *_: None)

    assert swarm.wait_for_exit() == []
    assert sum(c.microbatches for c in history.contributions) == 12 * 12 * 3
    run.assert_equals_reference()
