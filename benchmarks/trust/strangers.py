"""A run a third of whose members are liars, compared with its honest members alone.

    make bench-strangers

Real programs over loopback: HONEST volunteers a stage, and beside them LIARS modified clients of
the kinds of `kits.attack.strangers`, every cell audited. A liar stays until it has lost an audit,
or for STAY_STEPS steps; then the next kind takes its place with a new identity, so that a third of
the members are liars at any time. All computations are paced to a time that two cores of a small
machine can keep. The honest members alone train the same run with the same settings, for fewer
steps. Both must end with the held-out loss and the parameters of one process, to the bit. Writes
benchmarks/results/strangers.json.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.outcome import conclude, exit_if, out_option, result_head, work_folder
from benchmarks.trust.strangers_page import strangers_markdown
from kits.attack.strangers import (
    CHEATS,
    FIRST_STAGE_ONLY,
    HALF_DRAWS,
    LAST_STAGE_ONLY,
    MODIFIED,
    modified,
    names,
    standings,
    verdicts,
)
from kits.runs.fault_run import TINY
from kits.runs.real_run import Run, runs
from swarm_coordinator.demo.subprocesses import Subprocess

PACKAGES = ("torch", "libp2p", "hivemind", "swarmtrain")

STAGES = 2
HONEST, LIARS = 4, 2
"""Members of each stage."""
STAY_STEPS = 5
"""Steps after which a liar that has lost nothing makes room for the next kind."""
ALONE_STEPS = 8
"""Least number of steps of the honest members alone; these are all alike."""
FIRST_STEPS = 2
"""Leading steps that are not compared: processes warm up."""
MICROBATCHES = 72
"""Of a step, which then takes about 16 s: a third of what it takes over home lines."""
FORWARD_SECONDS = 0.4
"""Least time of a forward pass, also of one that audits."""

SETTINGS: Mapping[str, object] = {
    **TINY,
    "training__microbatches_per_step": MICROBATCHES,
    "training__evaluation_microbatches": 4,
    "limits__lease_seconds": 60.0,
    "limits__starting_peers_per_stage": HONEST,
    "trust__audit_share": 1.0,
    "rebalancing__rule": "none",
    "checkpoint__every_steps": 4,
}


@dataclass(slots=True)
class Turn:
    """One identity of a liar."""

    kind: str
    stage: int
    child: Subprocess
    mark: Path
    since: int
    """Version of the run when it was started."""
    until: int = 0
    """Version when it was ended; 0 while it takes part."""
    lost: bool = False

    def record(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "stage": self.stage, "lied": self.mark.exists(), "lost": self.lost,
            "since": self.since, "until": self.until,
        }  # fmt: skip


@dataclass(slots=True)
class LiarsInTurn:
    """The liars of a run: two a stage, each kind in its turn."""

    run: Run
    invite: str
    waiting: dict[int, list[str]] = field(default_factory=dict)
    """Kinds that have had no turn, by stage."""
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting = {stage: [] for stage in range(STAGES)}
        for kind in CHEATS:
            shortest = min(range(STAGES), key=lambda stage: len(self.waiting[stage]))
            stage = 0 if kind in FIRST_STAGE_ONLY else shortest
            self.waiting[STAGES - 1 if kind in LAST_STAGE_ONLY else stage].append(kind)

    @property
    def present(self) -> list[Turn]:
        return [turn for turn in self.turns if not turn.until]

    def fill(self, version: int) -> None:
        """Give free places to the next kinds; to those that had their turn, once all had one."""
        for stage in range(STAGES):
            for _ in range(LIARS - sum(turn.stage == stage for turn in self.present)):
                if not self.waiting[stage]:
                    self.waiting[stage] = [t.kind for t in self.turns if t.stage == stage]
                self._start(self.waiting[stage].pop(0), stage, version)

    def _start(self, kind: str, stage: int, version: int) -> None:
        mark = self.run.folder.path / f"lied-{len(self.turns)}"
        with modified(self.run, MODIFIED, kind, lied=mark, pace_seconds=FORWARD_SECONDS):
            child = self.run.swarm.start_volunteer(self.invite, stage=stage)
        self.run.swarm.expect_exit(child)
        self.turns.append(Turn(kind, stage, child, mark, version))

    def look(self, version: int) -> None:
        """End the liars that have lost an audit or whose time is over, and start the next ones."""
        stand = standings(self.run)
        for turn in self.present:
            found = stand.get(turn.child.name)
            turn.lost = found is not None and found.lost > 0
            if turn.lost or version - turn.since >= STAY_STEPS:
                turn.child.kill()
                turn.until = version
        self.fill(version)

    def all_had_a_turn(self) -> bool:
        return {turn.kind for turn in self.turns if turn.until} == set(CHEATS)


def start_honest(run: Run) -> str:
    with modified(run, HALF_DRAWS):
        invite = run.swarm.start_coordinator()
    with modified(run, MODIFIED, pace_seconds=FORWARD_SECONDS):
        for stage in range(STAGES):
            for _ in range(HONEST):
                run.swarm.start_volunteer(invite, stage=stage)
    return invite


def train_among_liars(run: Run) -> tuple[list[Turn], int]:
    """Train to the end; return the turns, and the version at which each kind had had its turn."""
    liars = LiarsInTurn(run, start_honest(run))
    enough = 0

    def look(seen: Any, _status: object) -> None:
        nonlocal enough
        version = seen.restored.version
        if not liars.turns:
            liars.fill(version)
        elif not enough:
            liars.look(version)
            if liars.all_had_a_turn():
                enough = version
                click.echo(f"each kind had its turn after {version} steps")

    run.swarm.watch(look)
    for turn in liars.present:
        turn.child.kill()
    run.swarm.wait_for_exit()
    return liars.turns, enough


def outcome_of(run: Run, last: int) -> dict[str, Any]:
    """The rate up to step `last`, and whether the run is that of one process."""
    seen = run.history()
    assert seen is not None, "the run has ended"
    steps = [step for step in seen.steps if FIRST_STEPS < step.step <= last]
    tokens, seconds = sum(s.tokens for s in steps), sum(s.seconds for s in steps)
    try:
        run.assert_equals_reference()
        equal = True
    except AssertionError:
        equal = False
    return {
        "tokens_per_second": tokens / seconds,
        "median_step_seconds": median(s.seconds for s in steps),
        "steps": len(steps),
        "step_seconds": [round(s.seconds, 2) for s in seen.steps],
        "heldout_loss": seen.heldout_loss,
        "equal_to_one_process": equal,
    }


def wrongly_lost(run: Run, turns: list[Turn]) -> list[str]:
    """Names of honest volunteers against which there is a verdict."""
    named, liars = names(run), {turn.child.name for turn in turns}
    return sorted({named[verdict.peer] for verdict in verdicts(run)} - liars)


def alone(run: Run) -> dict[str, Any]:
    start_honest(run)
    run.swarm.watch()
    run.swarm.wait_for_exit()
    return outcome_of(run, run.manifest.training.steps)


def among_liars(run: Run) -> dict[str, Any]:
    turns, enough = train_among_liars(run)
    return {
        **outcome_of(run, enough or run.manifest.training.steps),
        "turns": [turn.record() for turn in turns],
        "each_kind_had_its_turn_after": enough,
        "wrongly_lost": wrongly_lost(run, turns),
    }


def measured(
    work: Path, name: str, steps: int, train: Callable[[Run], dict[str, Any]]
) -> dict[str, Any]:
    folder = work / name
    folder.mkdir()
    with runs(folder) as make_run:
        return train(make_run(STAGES, steps, **SETTINGS))


@click.command()
@click.option("--steps", default=40, show_default=True, help="Of the run among liars.")
@out_option("strangers.json")
def main(steps: int, out: Path) -> None:
    """Measure a run among liars, and its honest members alone."""
    with work_folder("strangers", AssertionError) as work:
        honest = measured(work, "alone", max(ALONE_STEPS, steps // 4), alone)
        click.echo(f"honest members alone: {honest['tokens_per_second']:.0f} tokens/s")
        mixed = measured(work, "among liars", steps, among_liars)
    document = {
        **result_head(PACKAGES), "load_average": os.getloadavg(), "stages": STAGES,
        "honest_per_stage": HONEST, "liars_per_stage": LIARS, "stay_steps": STAY_STEPS,
        "forward_seconds": FORWARD_SECONDS, "microbatches": MICROBATCHES,
        "alone": honest, "among_liars": mixed,
    }  # fmt: skip
    conclude(out, document, strangers_markdown)
    exit_if(failed(document))


def failed(document: Mapping[str, Any]) -> list[str]:
    """What must not be in a result."""
    alone, among = document["alone"], document["among_liars"]
    return [
        text
        for text, wrong in (
            ("the honest run is not that of one process", not alone["equal_to_one_process"]),
            ("the run among liars is not that of one process", not among["equal_to_one_process"]),
            (f"honest members lost audits: {among['wrongly_lost']}", among["wrongly_lost"]),
            ("not every kind had its turn", not among["each_kind_had_its_turn_after"]),
        )
        if wrong
    ]


if __name__ == "__main__":
    main()
