"""The heart of it: a run under churn computes what one reliable machine would compute."""

from __future__ import annotations

import signal

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(420)]


@pytest.mark.parametrize("stages", [2, 3])
def test_twenty_steps_with_one_joining_and_one_leaving_equal_a_single_process(
    make_run, stages: int
) -> None:
    run = make_run(stages, steps=20)
    swarm = run.swarm
    invite = swarm.start_coordinator()
    for _ in range(2 * stages):
        swarm.start_volunteer(invite)

    run.wait_for_version(5)
    newcomer = swarm.start_volunteer(invite)
    run.wait_for_version(12)
    leaver = swarm.volunteers[0]
    swarm.excuse(leaver)
    leaver.signal(signal.SIGINT)
    history = swarm.watch(lambda *_: None)

    assert swarm.wait_for_goodbye() == []
    assert leaver.exit_code() == 0
    assert "contributed" in leaver.last_lines(1)[0]
    by_name = {peer.name: peer.peer for peer in history.peers}
    counted = {c.peer for c in history.contributions if c.microbatches > 0}
    assert by_name[newcomer.name] in counted
    assert sum(c.microbatches for c in history.contributions) == 20 * 12 * stages
    assert {link.protocol for link in history.links} >= {
        "/swarmtrain/stage/1",
        "all-reduce over p2pd",
    }
    run.assert_equals_reference()
