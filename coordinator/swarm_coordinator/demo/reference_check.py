"""The run's losses beside those of one process that computes the same run alone.

Owns the comparison, its table and its verdict. The one process is `offline.reference`: no network,
no volunteers, no coordinator. Losses are compared as floats with `==`; there is no tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm_coordinator.demo.churn import Kill
from swarm_coordinator.run_dir.folder import RunFolder, quoted
from swarm_coordinator.storage.history import History
from swarm_shared.base.errors import SwarmError
from swarm_shared.run.manifest import Manifest

COMPARED_STEPS = 60
"""Number of steps, from the first, that are computed again; the whole demo shall take less than
four minutes on two cores."""

TABLE_ROWS = 10
"""Number of steps in the table; all that differ are shown as well."""

_LOSS_WIDTH = 20
"""Characters of the longest float64 that `repr` gives for a loss."""


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """The loss of one step, computed twice."""

    step: int
    of_run: float
    alone: float

    @property
    def equal(self) -> bool:
        return self.of_run == self.alone


def steps_to_compare(steps: int, joined_step: int | None) -> int:
    """Return how many steps to compute again: always those up to the newcomer's first one."""
    return min(steps, max(COMPARED_STEPS, joined_step or 0))


def compare_with_reference(
    folder: RunFolder,
    manifest: Manifest,
    finished: History,
    steps: int,
    threads: int,
    device: str,
    on_step: Callable[[ComparedStep], None],
) -> list[ComparedStep]:
    """Train the first `steps` steps in this process, with the number of threads and the device that
    each volunteer has, and compare each with the run's."""
    from swarm_coordinator.offline.reference import StepRecord, train_reference, usable_device
    from swarm_shared.data.leaf_files import ShardSamples

    samples = ShardSamples(folder.data, manifest)
    of_run = {int(step.step): step.loss for step in finished.steps}
    compared: list[ComparedStep] = []

    def keep(record: StepRecord) -> None:
        compared.append(ComparedStep(record.step, of_run[record.step], record.loss))
        on_step(compared[-1])

    train_reference(
        manifest, samples.of_step, steps, keep, threads=threads, device=usable_device(device)
    )
    return compared


def table_head() -> str:
    return f"  {'step':>4}  {'loss of the run':<{_LOSS_WIDTH}}  loss of one process"


def table_row(one: ComparedStep) -> str:
    """Return both losses with all their digits: two floats that print alike are alike."""
    result = "equal" if one.equal else "DIFFERENT"
    losses = f"{one.of_run!r:<{_LOSS_WIDTH}}  {one.alone!r:<{_LOSS_WIDTH}}"
    return f"  {one.step:>4}  {losses}  {result}"


def rows_shown(steps: int) -> set[int]:
    """Return the steps in the table: evenly spaced, with the last one."""
    rows = min(steps, TABLE_ROWS)
    return {-(-number * steps // rows) for number in range(1, rows + 1)}


def remarks(kill: Kill | None, joined_step: int | None) -> dict[int, str]:
    """Return the lines that stand in the table before these steps."""
    if kill is None:
        return {}
    killed = f"{kill.victim} is killed after step {kill.after_step}"
    if joined_step is None:
        return {kill.after_step + 1: killed}
    if joined_step <= kill.after_step:
        return {joined_step: f"{killed}, and the run goes back to here"}
    joined = f"{kill.newcomer} computes from step {joined_step} on"
    return {kill.after_step + 1: killed, joined_step: joined}


def verdict(
    compared: Sequence[ComparedStep], steps: int, kill: Kill | None, joined_step: int | None
) -> str:
    """Return the sentence about losses that are all equal."""
    count = len(compared)
    which = f"All {count}" if count == steps else f"The first {count}"
    same = f"{which} losses are the same, to the bit"
    if kill is None:
        return f"{same}."
    although = f"{same}, although {kill.victim} was killed after step {kill.after_step}"
    if joined_step is None:
        return f"{although}. ({kill.newcomer} was still starting when the run ended.)"
    if joined_step <= kill.after_step:
        return (
            f"{although}, the only one with its stage: the run went back and computed step "
            f"{joined_step} and all later ones with {kill.newcomer}."
        )
    return f"{although} and {kill.newcomer} joined and computed from step {joined_step} on."


def require_equal(compared: Sequence[ComparedStep], folder: RunFolder) -> None:
    """Raise SwarmError when a loss differs."""
    unequal = [one for one in compared if not one.equal]
    if not unequal:
        return
    first = unequal[0]
    raise SwarmError(
        f"{len(unequal)} of {len(compared)} losses differ from those of one process, first at step "
        f"{first.step}: {first.of_run!r} in the run, {first.alone!r} alone. Both have to be "
        "equal to the bit, so this is an error of the program or of this machine. "
        f"`swarm-coordinator reference {quoted(folder.path)}` computes it again; keep this folder "
        "for a report"
    )
