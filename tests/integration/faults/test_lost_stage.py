"""Every peer of a stage is killed at once: the run waits, reports it, and continues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kits.runs.fault_run import STEPS, TINY, FaultRun
from swarm_client.fault_injection.faults import FaultAction, FaultPoint
from swarm_coordinator.demo.subprocesses import wait_until

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(600)]

PATIENCE_SECONDS = 120.0


@pytest.fixture
def fault_run(make_run: Callable[..., Any]) -> FaultRun:
    return FaultRun(make_run(2, STEPS, **{**TINY, "checkpoint__every_steps": 4}), 2)


def kill_stage(fault_run: FaultRun, stage: int) -> None:
    for name in fault_run.ready_names(stage):
        child = fault_run.child(name)
        fault_run.run.swarm.expect_exit(child)
        child.kill()


def wait(fault_run: FaultRun, ready: Callable[[], bool], what: str) -> None:
    wait_until(ready, fault_run.run.swarm.children, PATIENCE_SECONDS, what)


def wait_for_word(fault_run: FaultRun, word: str) -> None:
    wait(fault_run, lambda: any(word in note for note in fault_run.notes()), f"the word {word!r}")


def test_a_lost_stage_is_taken_over_by_joining_peers(
    fault_run: FaultRun,
) -> None:
    run = fault_run.run
    fault_run.start(2)
    run.wait_for_version(6)
    kill_stage(fault_run, 1)
    wait_for_word(fault_run, "stage 1 has lost every peer: the run waits for a peer to hold it")
    wait(fault_run, lambda: "stage 1" in fault_run.status()["waiting_for"], "the status to say so")
    stood_at = run.version()
    for _ in range(2):
        run.swarm.start_volunteer(fault_run.invite, 1)
    run.wait_for_version(stood_at + 4)
    assert any("stage 1 is held again" in note for note in fault_run.notes())
    assert any("the run goes back from step" in note for note in fault_run.notes())
    fault_run.finish()
    # Each step counts each microbatch once, across rolled-back histories.
    run.assert_equals_reference(fault_run.stopped_at)
    seen = run.swarm.history()
    assert seen is not None
    counted = sum(contribution.microbatches for contribution in seen.contributions)
    per_step = run.manifest.training.microbatches_per_step
    assert counted == fault_run.stopped_at * per_step * 2


@pytest.mark.parametrize("action", [FaultAction.FREEZE, FaultAction.DELAY, FaultAction.PARTITION])
def test_a_peer_that_fails_while_it_moves_to_a_lost_stage_counts_nothing_twice(
    fault_run: FaultRun, action: FaultAction
) -> None:
    """No volunteer has asked for a stage, so that the coordinator may move each of them.

    `test_exact` kills one there.
    """
    run, swarm = fault_run.run, fault_run.run.swarm
    fault_run.invite = swarm.start_coordinator()
    for _ in range(5):
        swarm.start_volunteer(fault_run.invite)
    fault_run.wait_staffed(2)
    run.wait_for_version(5)
    lost = min((0, 1), key=lambda stage: len(fault_run.ready_names(stage)))
    fault_run.plan_for_anybody("moving", FaultPoint.STAGE_MIGRATION, action, seconds=3.5)
    kill_stage(fault_run, lost)
    wait(fault_run, lambda: fault_run.has_fired("moving"), "the fault in the move")
    stood_at = run.version()
    swarm.start_volunteer(fault_run.invite)
    run.wait_for_version(stood_at + 4)
    fault_run.finish()
    run.assert_equals_reference(fault_run.stopped_at)
