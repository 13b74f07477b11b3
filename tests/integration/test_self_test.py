"""A machine that errs once, on real processes: it tests itself, and comes back or ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from kits.attack.strangers import (
    MODIFIED,
    check_ledger,
    counted,
    modified,
    names,
    standings,
    verdicts,
)
from kits.runs.fault_run import TINY
from kits.runs.real_run import Run
from swarm_coordinator.demo.subprocesses import Subprocess
from swarm_shared.base.errors import MachineError

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(400)]

HONEST = 3
STEPS = 2000
"""More than are made here: the run is stopped."""


def run_with_one_error(make_run, erring: Path, cheat: str) -> tuple[Run, Subprocess]:
    """A run in which every cell is audited and one volunteer has lost an audit."""
    run = make_run(
        1, STEPS,
        **{
            **TINY, "limits__starting_peers_per_stage": HONEST + 1, "trust__audit_share": 1.0,
            "checkpoint__every_steps": 1,
        },
    )  # fmt: skip
    swarm = run.swarm
    invite = swarm.start_coordinator()
    with modified(run, MODIFIED, cheat, lied=erring):
        flaky = swarm.start_volunteer(invite)
    swarm.expect_exit(flaky)
    for _ in range(HONEST):
        swarm.start_volunteer(invite)
    run.wait_for(lambda: verdicts(run) != (), "a verdict")
    (verdict,) = verdicts(run)
    assert names(run)[verdict.peer] == flaky.name
    return run, flaky


def assert_ends_equal(run: Run) -> None:
    stopped = run.stop()
    run.assert_equals_reference(stopped)
    assert len(verdicts(run)) == 1
    check_ledger(run)


def test_a_machine_that_passes_its_self_test_counts_again(make_run, tmp_path: Path) -> None:
    run, flaky = run_with_one_error(make_run, tmp_path / "erred", "wrong in one process")
    peer = verdicts(run)[0].peer
    before = counted(run)[peer]
    run.wait_for(lambda: counted(run)[peer] > before, "it to count again")
    run.wait_for(lambda: standings(run)[flaky.name].passed > 0, "it to pass an audit")
    assert standings(run)[flaky.name].lost == 1
    said = flaky.log.read_text()
    for sentence in (
        "the run refuses this volunteer",
        "swarm-client doctor --self-test",
        "of step",
        "this machine tests itself for 60 s",
        "the self-test has passed",
    ):
        assert sentence in said
    assert_ends_equal(run)


def test_a_machine_that_fails_its_self_test_ends_and_says_what_differed(
    make_run, tmp_path: Path
) -> None:
    run, flaky = run_with_one_error(
        make_run, tmp_path / "erred", "wrong in one process, and in self-tests"
    )
    run.wait_for(lambda: flaky.exit_code() is not None, "it to end")
    assert flaky.exit_code() == MachineError.exit_code
    (said,) = (line for line in flaky.log.read_text().splitlines() if "has failed" in line)
    assert "in round 2 the gradient of the input differed" in said
    assert "Undo any overclocking" in said
    run.wait_for_version(run.version() + 2)
    assert_ends_equal(run)
