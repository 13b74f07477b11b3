"""A real run of which a third of each stage lies, each member in its own way.

A liar that was found is ended and another kind takes its place, as a new identity, until the run
ends; so all kinds of `kits.attack.strangers.CHEATS` take part, several at a time. Each volunteer is
a slow machine of its own (SWARM_TEST_PACE_SECONDS), so that the rate of the honest ones does not
depend on what the liars' processes cost on shared cores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from kits.attack.strangers import (
    CHEATS,
    FIRST_STAGE_ONLY,
    HALF_DRAWS,
    LAST_STAGE_ONLY,
    LOSES,
    MODIFIED,
    check_ledger,
    check_names,
    modified,
    names,
    verdicts,
)
from kits.runs.fault_run import TINY
from kits.runs.real_run import Run
from swarm_coordinator.demo.subprocesses import Subprocess
from swarm_coordinator.storage.history import History
from swarm_shared.base.types import Version

STAGES, STEPS = 2, 100
"""As many steps as suffice for all kinds, one after the other in each place."""
HONEST_PER_STAGE, LIARS_PER_STAGE = 4, 2
PACE_SECONDS = 0.15
"""Of a forward pass, which the processor does in a hundredth of it."""

STEPS_WITH_A_LIAR = 1
"""Steps that a liar stays after its first lie, if its kind loses no audit."""

AT_THE_START = ("another state for others", "false statements", "false claim of withheld inputs")
"""Kinds that take part from the first step: beside two established owners a newcomer is asked for
no snapshot and no audit."""

SETTINGS: dict[str, object] = {
    **TINY,
    "training__microbatches_per_step": 24,
    "training__evaluation_microbatches": 2,
    "trust__audit_share": 1.0,
    "rebalancing__rule": "none",
    "checkpoint__every_steps": 2,
}


def settings(*, liars: bool) -> dict[str, object]:
    """Settings of a run, which begins with all that are to be in a stage."""
    starting = HONEST_PER_STAGE + LIARS_PER_STAGE * liars
    return {**SETTINGS, "limits__starting_peers_per_stage": starting}


@dataclass
class Place:
    """The place of one liar after the other."""

    stage: int
    child: Subprocess
    cheat: str
    lied_at: Version | None = None
    """The version at which its first lie was seen."""


@dataclass
class MixedRun:
    """`start`, `train`, `check`."""

    run: Run
    liars: dict[str, str] = field(default_factory=dict)
    """Kinds by name, of all liars that were ever started."""
    through: dict[str, str] = field(default_factory=dict)
    """Kinds by name, of those that have lied and were found, or stayed as long as they should."""
    _shares: list[float] = field(default_factory=list)
    """Shares of liars among the peers with a stage, at every look at the run."""
    _invite: str = ""
    _places: list[Place] = field(default_factory=list)
    _kinds: dict[int, deque[str]] = field(default_factory=dict)

    def start(self, *, liars: bool) -> None:
        """Start all processes."""
        swarm = self.run.swarm
        with modified(self.run, HALF_DRAWS):
            self._invite = swarm.start_coordinator()
        if liars:
            self._kinds = _kinds_by_stage()
            for stage in self._kinds:
                self._places += [self._next(stage) for _ in range(LIARS_PER_STAGE)]
        with modified(self.run, MODIFIED, pace_seconds=PACE_SECONDS):
            for _ in range(HONEST_PER_STAGE):
                for stage in range(STAGES):
                    swarm.start_volunteer(self._invite, stage=stage)

    def train(self) -> None:
        """Follow the run to its end, with a new liar for each that is through."""
        swarm = self.run.swarm
        swarm.watch(self._look)
        for place in self._places:
            place.child.kill()
        assert swarm.wait_for_exit() == []

    def check(self) -> None:
        """All kinds were there, no bit was changed, and the right ones were named."""
        assert set(self.through.values()) == set(CHEATS), set(CHEATS) - set(self.through.values())
        self.run.assert_equals_reference()
        check_names(self.run, self.liars, set(self.through))
        seen, named = self.run.history(), names(self.run)
        assert seen is not None
        refused = {
            named[note.peer]
            for note in seen.notes
            if note.peer in named and ("was refused" in note.text or "held up" in note.text)
        }
        assert refused <= set(self.liars), f"honest volunteers were refused: {refused}"
        check_ledger(self.run)

    def tokens_per_second(self) -> float:
        """Tokens over seconds of the steps after the first."""
        seen = self.run.history()
        assert seen is not None
        steps = seen.steps[1:]
        return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)

    def share_of_liars(self) -> float:
        """Mean share of liars among the peers with a stage, as a process takes time to start."""
        return fmean(self._shares)

    # ---- liars

    def _look(self, seen: History, status: Mapping[str, Any]) -> None:
        ready = [peer["name"] for peer in status.get("peers", ()) if peer["phase"] == "ready"]
        if ready and seen.steps:
            self._shares.append(sum(name in self.liars for name in ready) / len(ready))
        self._replace(seen.restored.version)

    def _next(self, stage: int) -> Place:
        """Start a liar of the stage's next kind."""
        kinds = self._kinds[stage]
        cheat = kinds.popleft()
        kinds.append(cheat)
        swarm = self.run.swarm
        mark = self._mark(f"volunteer-{len(swarm.volunteers) + 1}")
        with modified(self.run, MODIFIED, cheat, lied=mark, pace_seconds=PACE_SECONDS):
            child = swarm.start_volunteer(self._invite, stage=stage)
        swarm.expect_exit(child)
        self.liars[child.name] = cheat
        return Place(stage, child, cheat)

    def _mark(self, name: str) -> Path:
        return self.run.folder.path / f"{name}.lied"

    def _replace(self, version: Version) -> None:
        named = names(self.run)
        lost = {named[verdict.peer] for verdict in verdicts(self.run)}
        for number, place in enumerate(self._places):
            if place.lied_at is None and self._mark(place.child.name).exists():
                place.lied_at = version
            if self._is_through(place, version, lost):
                place.child.kill()
                self.through[place.child.name] = place.cheat
                self._places[number] = self._next(place.stage)

    def _is_through(self, place: Place, version: Version, lost: set[str]) -> bool:
        if place.child.name in lost:
            return True
        if CHEATS[place.cheat] == LOSES or place.lied_at is None:
            return False
        return version >= place.lied_at + STEPS_WITH_A_LIAR or place.child.exit_code() is not None


def _kinds_by_stage() -> dict[int, deque[str]]:
    """Every kind in a stage in which it can lie; as many in the first one as in the last."""
    first, last = AT_THE_START[:LIARS_PER_STAGE], AT_THE_START[LIARS_PER_STAGE:]
    kinds = {0: [*first, *sorted(FIRST_STAGE_ONLY)], 1: [*last, *sorted(LAST_STAGE_ONLY)]}
    for cheat in sorted(set(CHEATS) - {*kinds[0], *kinds[1]}):
        min(kinds.values(), key=len).append(cheat)
    return {stage: deque(of_stage) for stage, of_stage in kinds.items()}
