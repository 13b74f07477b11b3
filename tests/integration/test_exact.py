"""Real runs under churn have the losses and parameters of one process, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from kits.runs.fault_run import STEPS, TINY, FaultRun
from swarm_client.control.client import ask
from swarm_client.fault_injection.faults import FaultAction, FaultPoint
from swarm_coordinator.demo.subprocesses import Subprocess, wait_until

pytestmark = pytest.mark.timeout(420)

STAGES, VOLUNTEERS = 3, 7
CHECKPOINT_STEPS = 4
PATIENCE_SECONDS = 120.0
STILL_COUNTED = 16
"""Upper bound of microbatches that were counted before a pause and are reported after it: those of
two steps, which are open at once with staleness 1."""
PAUSED_STEPS = 8
"""Steps of a pause: half of their microbatches are more than what may still be counted."""


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
    history = swarm.watch()

    assert swarm.wait_for_exit() == []
    assert run.losses()[: len(before)] == before  # no acknowledged step was lost
    assert history.restored.generation == 2
    assert sum(c.microbatches for c in history.contributions) == 16 * 12 * 2
    run.assert_equals_reference()


@pytest.mark.process
def test_everything_at_once_changes_no_bit(make_run) -> None:
    """The default codec, staleness, tied embeddings and bottlenecks; two kills, a join, a pause, a
    coordinator restart, and a stage that is lost, for which peers move and the run rolls back."""
    run = make_run(
        STAGES, STEPS,
        **{
            **TINY, "codecs__activation": "int8", "codecs__gradient": "int8",
            "model__tie_embeddings": True, "model__bottleneck_size": 8, "training__staleness": 1,
            "checkpoint__every_steps": CHECKPOINT_STEPS,
        },
    )  # fmt: skip
    swarm, fault_run = run.swarm, FaultRun(run, STAGES)
    fault_run.invite = swarm.start_coordinator()
    for _ in range(VOLUNTEERS):
        # None asks for a stage, so that the coordinator may move each of them.
        swarm.start_volunteer(fault_run.invite)
    fault_run.wait_staffed(2)
    run.wait_for_version(3)

    run.kill(a_ready_peer(fault_run))
    swarm.start_volunteer(fault_run.invite)
    run.wait_for_version(run.version() + 2)
    before = run.restart_coordinator(fault_run.invite)
    fault_run.wait_staffed(2)
    pause_for_steps(fault_run, a_ready_peer(fault_run), PAUSED_STEPS)
    lost_at = lose_a_stage(fault_run)
    run.wait_for_version(lost_at + 4)
    fault_run.finish()

    assert fault_run.end_problem == "", fault_run.end_problem
    assert run.losses()[: len(before)] == before
    notes = "\n".join(fault_run.notes())
    assert "the run goes back from step" in notes
    assert "no peer holds this stage any more" in notes
    history = run.history()
    assert history is not None
    assert history.restored.generation == 2
    per_step = run.manifest.training.microbatches_per_step
    counted = sum(contribution.microbatches for contribution in history.contributions)
    assert counted == fault_run.stopped_at * per_step * STAGES
    run.assert_equals_reference(fault_run.stopped_at)


def a_ready_peer(fault_run: FaultRun) -> Subprocess:
    """A peer of the stage with the most of them."""
    stages = [fault_run.ready_names(stage) for stage in range(STAGES)]
    return fault_run.child(max(stages, key=len)[0])


def pause_for_steps(fault_run: FaultRun, volunteer: Subprocess, steps: int) -> None:
    """Pause it; it takes part in so many steps without computing for them; resume it."""
    run = fault_run.run
    socket = run.swarm.home(volunteer.name) / "control.sock"

    def shown() -> dict[str, Any]:
        peers = fault_run.status()["peers"]
        return next(peer for peer in peers if peer["name"] == volunteer.name)

    def wait(paused: bool) -> None:
        wait_until(
            lambda: shown()["paused"] is paused, run.swarm.children, PATIENCE_SECONDS,
            f"paused: {paused}",
        )  # fmt: skip

    ask(socket, "pause", seconds=None)
    wait(True)
    counted = ask(socket, "status")["contribution"]["microbatches"]
    run.wait_for_version(run.version() + steps)
    assert shown()["phase"] == "ready"
    assert ask(socket, "status")["contribution"]["microbatches"] - counted <= STILL_COUNTED
    ask(socket, "resume")
    wait(False)


def lose_a_stage(fault_run: FaultRun) -> int:
    """Kill every peer of one stage, and the first peer that moves there; let another one join.

    Return the version at which the run had lost the stage.
    """
    run, swarm = fault_run.run, fault_run.run.swarm
    # One without a stage would take the lost one, and nobody would move.
    wait_until(
        lambda: sum(len(fault_run.ready_names(stage)) for stage in range(STAGES)) == VOLUNTEERS,
        swarm.children, PATIENCE_SECONDS, "every volunteer to hold a stage",
    )  # fmt: skip
    for child in swarm.volunteers:
        swarm.expect_exit(child)
    fault_run.plan_for_anybody("moving", FaultPoint.STAGE_MIGRATION, FaultAction.KILL, 0.0)
    lost = min(range(STAGES), key=lambda stage: len(fault_run.ready_names(stage)))
    # Right after a checkpoint: at the version of one the run would not go back.
    run.wait_for_version(
        run.version() // CHECKPOINT_STEPS * CHECKPOINT_STEPS + CHECKPOINT_STEPS + 1
    )
    for name in fault_run.ready_names(lost):
        fault_run.child(name).kill()
    lost_at = run.version()
    wait_until(
        lambda: fault_run.has_fired("moving"), swarm.children, PATIENCE_SECONDS, "the second kill"
    )
    swarm.start_volunteer(fault_run.invite)
    return lost_at
