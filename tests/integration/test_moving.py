"""A volunteer is moved between the stages of a running run."""

from __future__ import annotations

import pytest

from swarm_coordinator.status.status_file import read_status
from swarm_coordinator.status.text import status_lines

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(420)]

STEPS = 24


def test_a_volunteer_moves_to_the_slowest_stage_and_the_run_equals_the_reference(
    make_run,
) -> None:
    run = make_run(
        2, steps=STEPS, limits__starting_peers_per_stage=1, rebalancing__period_seconds=1.0
    )
    swarm = run.swarm
    invite = swarm.start_coordinator()
    # The first two take one stage each; the later two ask for the first.
    for _ in range(2):
        swarm.start_volunteer(invite)
    run.wait_for_version(1)
    for _ in range(2):
        swarm.start_volunteer(invite, 0)
    history = swarm.watch()

    assert swarm.wait_for_exit() == []
    assert any("moved to stage 1" in "\n".join(v.last_lines(400)) for v in swarm.volunteers)
    assert sum(c.microbatches for c in history.contributions) == STEPS * 12 * 2
    both = [
        peer for peer in history.names
        if {c.stage for c in history.contributions if c.peer == peer} == {0, 1}
    ]  # fmt: skip
    assert both, "no peer has counted microbatches in both stages"
    status = read_status(run.folder.status)
    assert status is not None
    told = status_lines(status, 0.0)
    assert any("moves from stage 0 to stage 1" in line for line in told)
    assert any("it downloads" in line for line in told)
    run.assert_equals_reference()
