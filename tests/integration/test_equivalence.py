"""Runs that differ from those of `test_exact` in one setting."""

from __future__ import annotations

import signal

import pytest

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(420)]


def test_plain_float32_averages_with_a_join_and_a_graceful_leave_stay_near_the_reference(
    make_run,
) -> None:
    run = make_run(3, steps=20, codecs__average="none")
    swarm = run.swarm
    invite = swarm.start_coordinator()
    for _ in range(6):
        swarm.start_volunteer(invite)

    run.wait_for_version(5)
    joining = swarm.start_volunteer(invite)
    run.wait_for_version(12)
    leaving = swarm.volunteers[0]
    swarm.expect_exit(leaving)
    leaving.signal(signal.SIGINT)
    swarm.watch()

    history = run.history_at_its_end()
    assert leaving.exit_code() == 0
    assert "contributed" in leaving.last_lines(1)[0]
    by_name = {name: peer for peer, name in history.names.items()}
    counted = {c.peer for c in history.contributions if c.microbatches > 0}
    assert by_name[joining.name] in counted
    assert sum(c.microbatches for c in history.contributions) == 20 * 12 * 3
    assert {link.protocol for link in history.links} >= {
        "/swarmtrain/stage/1",
        "all-reduce over p2pd",
    }
    run.assert_near_reference(1e-4)


def test_a_bfloat16_run_equals_a_bfloat16_process(make_run) -> None:
    run = make_run(
        2, steps=3, training__dtype="bfloat16", training__microbatches_per_step=4,
        model__sequence_length=32, limits__starting_peers_per_stage=1,
    )  # fmt: skip
    swarm = run.swarm
    invite = swarm.start_coordinator()
    for _ in range(2):
        swarm.start_volunteer(invite)
    swarm.watch()

    assert swarm.wait_for_exit() == []
    run.assert_equals_reference()
