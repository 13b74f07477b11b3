"""Runs that are stopped and continued, or whose volunteers lack hivemind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from kits.runs.real_run import Run
from swarm_coordinator.status.status_file import read_status
from swarm_coordinator.storage.database import open_for_reading
from swarm_coordinator.storage.records import read_newest_evaluation

pytestmark = [pytest.mark.process, pytest.mark.timeout(420)]

STEPS = 8


def test_a_stopped_run_continues_at_its_last_step_with_other_volunteers(make_run) -> None:
    """The other ones compute with two threads each, as the reference does not."""
    run = make_run(
        2, steps=STEPS, limits__starting_peers_per_stage=1, checkpoint__every_steps=3,
        evaluation__every_steps=1,
    )  # fmt: skip
    swarm = run.swarm
    invite = swarm.start_coordinator()
    for _ in range(2):
        swarm.start_volunteer(invite)
    run.wait_for_version(2)
    assert swarm.coordinator is not None
    swarm.coordinator.signal(signal.SIGINT)
    assert swarm.coordinator.wait(60) == 0
    stopped_at = run.version()
    for volunteer in swarm.volunteers:
        volunteer.kill()
    for child in swarm.children.started:
        swarm.expect_exit(child)
    before = run.losses()

    swarm.start_coordinator()
    swarm.threads = 2
    # On a machine shared with other tests, a waiting thread must not keep a core from working ones.
    swarm.environment["OMP_WAIT_POLICY"] = "PASSIVE"
    for _ in range(2):
        swarm.start_volunteer(invite)
    swarm.watch()

    assert len(before) == stopped_at >= 2
    assert run.losses()[:stopped_at] == before  # the checkpoint was of the very last step
    run.assert_equals_reference()
    # The finished run stays up, and its last checkpoint is evaluated here as the swarm did it.
    swarm.wait_for_exit()
    swarm.start_coordinator()
    run.wait_for(lambda: evaluated(run) == STEPS, "an evaluation of the last checkpoint")
    with open_for_reading(run.database) as connection:
        found = read_newest_evaluation(connection)
    seen = run.history()
    assert found is not None
    assert seen is not None
    assert found.heldout_loss == seen.heldout_loss
    assert found.sample
    swarm.coordinator.signal(signal.SIGINT)
    assert swarm.coordinator.wait(60) == 0


def evaluated(run: Run) -> int | None:
    """The checkpoint whose evaluation the status shows."""
    status = read_status(run.folder.status)
    return None if status is None or status.evaluation is None else status.evaluation.version


@pytest.mark.nightly
def test_a_stage_with_a_member_without_hivemind_averages_over_libp2p(
    make_run, tmp_path: Path
) -> None:
    """hivemind is hidden from one volunteer, as on a system without a wheel of it."""
    hiding = tmp_path / "hiding"
    hiding.mkdir()
    (hiding / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "def find_others(name, path=None, target=None):\n"
        "    return None if name == 'hivemind' else find(name, path, target)\n"
        "PathFinder.find_spec = find_others\n"
    )
    run = make_run(1, steps=3)
    swarm = run.swarm
    invite = swarm.start_coordinator()
    swarm.environment["PYTHONPATH"] = str(hiding)
    without = swarm.start_volunteer(invite)
    del swarm.environment["PYTHONPATH"]
    swarm.start_volunteer(invite)
    swarm.watch()

    history = run.history_at_its_end()
    assert any("all-reduce goes over libp2p" in line for line in without.last_lines(50))
    protocols = {link.protocol for link in history.links}
    assert "/swarmtrain/all-reduce/1" in protocols
    assert "all-reduce over p2pd" not in protocols
    run.assert_equals_reference()
