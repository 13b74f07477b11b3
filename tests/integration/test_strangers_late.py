"""A lie that is found after its step was applied, on real processes.

Auditors are away for some steps, as paused machines are: a cell that finds no auditor counts
unaudited. A liar that has counted honestly until then uses these steps, and goes on lying when the
auditors are back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
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
from swarm_coordinator.storage.database import open_for_reading

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(400)]

HONEST = 3
STEPS = 2000
"""More than are made here: the run is stopped."""


@dataclass(frozen=True)
class LateVerdict:
    """What a liar did before it was found."""

    peer: str
    credit: int
    """Microbatches that it had counted in applied steps, lies included."""
    step: int
    """The step in which it was found."""


def lie_unwatched(run: Run, unwatched: Path) -> LateVerdict:
    """Have a liar count in steps without audits, and bring the auditors back."""
    swarm = run.swarm
    invite = swarm.start_coordinator()
    with modified(run, MODIFIED, "sign flipped once unwatched", unwatched=unwatched):
        liar = swarm.start_volunteer(invite)
    swarm.expect_exit(liar)
    with modified(run, MODIFIED, "no audits while unwatched", unwatched=unwatched):
        for _ in range(HONEST):
            swarm.start_volunteer(invite)
    run.wait_for_version(2)
    run.wait_for(lambda: liar.name in standings(run), "the liar to have a standing")
    peer = next(peer for peer, name in names(run).items() if name == liar.name)
    run.wait_for(lambda: standings(run)[liar.name].passed > 0, "the liar to pass an audit")
    unwatched.touch()
    # The work of the step after the next one begins when the file is there.
    run.wait_for_version(run.version() + 1)
    before = counted(run)[peer]
    run.wait_for(lambda: counted(run)[peer] > before, "the liar to count in an applied step")
    credit = counted(run)[peer]
    # A lie changes the losses of the steps after its own: one of them is to be unwatched, too.
    run.wait_for_version(run.version() + 1)
    assert verdicts(run) == ()
    unwatched.unlink()
    run.wait_for(lambda: verdicts(run) != (), "a verdict")
    (verdict,) = verdicts(run)
    assert verdict.peer == peer
    return LateVerdict(peer, credit, verdict.step)


def losses_of_all_rows(run: Run) -> list[tuple[int, float, bool]]:
    """Step, loss, and whether the run has gone back before it, of every step ever applied."""
    with open_for_reading(run.database) as connection:
        rows = connection.execute(
            "SELECT step, loss, superseded_by FROM applied_steps ORDER BY id"
        ).fetchall()
    return [(step, loss, superseded is not None) for step, loss, superseded in rows]


def make(make_run, answer: str) -> Run:
    return make_run(
        1, STEPS,
        **{
            **TINY, "limits__starting_peers_per_stage": HONEST + 1, "trust__audit_share": 1.0,
            "trust__on_late_verdict": answer, "checkpoint__every_steps": 1,
            "checkpoint__keep": 50,
        },
    )  # fmt: skip


def test_a_late_verdict_takes_the_lies_out_of_the_model(make_run, tmp_path: Path) -> None:
    run = make(make_run, "roll back")
    late = lie_unwatched(run, tmp_path / "unwatched")

    def said() -> list[tuple[str, ...]]:
        seen = run.history()
        pattern = r"goes back from step (\d+) to its checkpoint at (\d+)"
        return [] if seen is None else re.findall(pattern, "\n".join(n.text for n in seen.notes))

    run.wait_for(lambda: said() != [], "the run to go back")
    [(before, checkpoint)] = said()
    assert 0 < int(checkpoint) < int(before) <= late.step
    run.wait_for_version(int(before) + 2)
    stopped = run.stop()
    expected = run.reference_losses(stopped)
    # The lies were in the model: what the run has gone back from was another training.
    left = [(step, loss) for step, loss, superseded in losses_of_all_rows(run) if superseded]
    assert [step for step, _ in left] == list(range(int(checkpoint) + 1, int(before) + 1))
    assert any(loss != expected[step - 1] for step, loss in left)
    run.assert_equals_reference(stopped)
    check_ledger(run)


def test_a_run_that_goes_on_after_a_late_verdict_has_it_in_its_ledger(
    make_run, tmp_path: Path
) -> None:
    run = make(make_run, "go on")
    late = lie_unwatched(run, tmp_path / "unwatched")
    found = run.version()
    run.wait_for_version(found + 3)
    stopped = run.stop()
    assert not any(superseded for *_, superseded in losses_of_all_rows(run))
    # Nothing takes the lies out again, and none is added.
    assert list(run.losses()) != list(run.reference_losses(stopped))
    assert len(verdicts(run)) == 1
    check_ledger(run)
    # What it has counted since its last passed audit is no credit.
    assert counted(run)[late.peer] < late.credit
