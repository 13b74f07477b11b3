"""One real run that many faults befall, one after the other, each at its own step and peer.

Processes take seconds to start, so that a run carries a list of cases: for each, the stages are
staffed again, a fault is planned for a step that is still to come, and the run goes on past it.
What happened is kept per case; at the end the run is stopped and compared with the reference.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kits.runs.real_run import PATIENCE_SECONDS, Run
from swarm_client.fault_injection.faults import (
    ANY_PEER,
    PLAN_VARIABLE,
    FaultAction,
    FaultPoint,
    fired_path,
)
from swarm_coordinator.demo.subprocesses import Subprocess, wait_until
from swarm_shared.base.errors import SwarmError

TINY: dict[str, object] = {
    "model__hidden_size": 32,
    "model__intermediate_size": 64,
    "model__layers": 3,
    "model__heads": 2,
    "model__key_value_heads": 1,
    "model__sequence_length": 32,
    "training__microbatches_per_step": 8,
    "training__sequences_per_microbatch": 2,
    "training__evaluation_microbatches": 0,
    "optimizer__learning_rate": 3e-4,
    "limits__heartbeat_seconds": 0.5,
    "limits__dead_after_seconds": 2.0,
    "limits__receipt_interval_seconds": 0.2,
    "limits__round_stall_seconds": 2.0,
    "limits__lease_seconds": 20.0,
    "limits__join_hold_seconds": 20.0,
    "checkpoint__every_steps": 16,
}
"""Steps of a fraction of a second: what is measured here is whether, not how fast."""

LARGE: dict[str, object] = {
    **TINY,
    "model__hidden_size": 256,
    "model__intermediate_size": 1024,
    "model__layers": 6,
}
"""Stages whose gradients are larger than what auditors compare of them."""

STEPS = 2000
"""More than any run here reaches: it is stopped when its cases are through."""

WHOLE_STAGE = 3
"""Peers of a stage at the start: a majority is there when one of them differs."""

ENOUGH = 2
"""Peers of a stage without which no case begins, so that the run can go on when one dies."""

CASE_SECONDS = 90.0


@dataclass(frozen=True)
class Case:
    """`action` at `phase`, by some peer of `stage`, or by a newcomer to it."""

    action: FaultAction
    phase: FaultPoint
    stage: int = 0
    seconds: float = 0.0
    newcomer: bool = False
    anybody: bool = False
    """Whoever gets there first: the run chooses who saves a checkpoint."""
    peers: int = ENOUGH
    says: str = ""
    """Words that the coordinator must say about it."""

    @property
    def name(self) -> str:
        length = f"-{self.seconds:g}s" if self.seconds else ""
        return f"{self.action}{length}-at-{self.phase}".replace(" ", "-")

    @property
    def dies(self) -> bool:
        """The volunteer does not come back by itself, and another one takes its place."""
        return self.action is FaultAction.KILL


@dataclass
class Outcome:
    case: Case
    fired_step: int = 0
    problem: str = ""
    version_before: int = 0
    version_after: int = 0
    said: list[str] = field(default_factory=list)


class FaultRun:
    """`carry` the cases, then `finish`."""

    def __init__(self, run: Run, stages: int) -> None:
        self.run = run
        self.stages = stages
        self.plan = run.folder.path.parent / "faults.json"
        self.invite = ""
        self.outcomes: dict[str, Outcome] = {}
        self.stopped_at = 0
        self.end_problem = ""
        self._planned: list[dict[str, Any]] = []
        self._write_plan()
        run.swarm.environment[PLAN_VARIABLE] = str(self.plan)

    # ---- the swarm

    def start(self, peers: int = WHOLE_STAGE) -> None:
        self.invite = self.run.swarm.start_coordinator()
        for _ in range(peers):
            for stage in range(self.stages):
                self.run.swarm.start_volunteer(self.invite, stage)
        self.wait_staffed(peers)

    def status(self) -> dict[str, Any]:
        return dict(self.run.swarm.status())

    def ready_names(self, stage: int) -> list[str]:
        """Those that the status tells of, which is of up to a second ago, and that live now."""
        return [
            peer["name"]
            for peer in self.status().get("peers", [])
            if peer["stage"] == stage
            and peer["phase"] == "ready"
            and self.child(peer["name"]).exit_code() is None
        ]

    def wait_staffed(self, peers: int = WHOLE_STAGE) -> None:
        def whole() -> bool:
            return all(len(self.ready_names(stage)) >= peers for stage in range(self.stages))

        wait_until(whole, self.run.swarm.children, PATIENCE_SECONDS, "every stage to be staffed")

    def child(self, name: str) -> Subprocess:
        return next(child for child in self.run.swarm.volunteers if child.name == name)

    def notes(self) -> list[str]:
        seen = self.run.swarm.history()
        return [note.text for note in seen.notes] if seen is not None else []

    # ---- cases

    def carry(self, cases: Sequence[Case]) -> None:
        """One after the other; a case that goes wrong does not keep the others from being tried."""
        for case in cases:
            outcome = self.outcomes[case.name] = Outcome(case)
            try:
                self._carry(case, outcome)
            except Exception as error:  # noqa: BLE001  reported by the case's own test
                outcome.problem = f"{type(error).__name__}: {error}"

    def _carry(self, case: Case, outcome: Outcome) -> None:
        swarm = self.run.swarm
        self.wait_staffed(case.peers - case.newcomer)
        said = len(self.notes())
        outcome.version_before = self.run.version()
        excused = list(swarm.children.exit_expected)
        if case.anybody:
            every = self.run.manifest.checkpoint_steps
            self._plan(case, ANY_PEER, every * ((outcome.version_before + 2) // every + 1))
        elif case.newcomer:
            self._plan(case, f"volunteer-{len(swarm.volunteers) + 1}", None)
            swarm.start_volunteer(self.invite, case.stage)
        else:
            self._plan(case, self.ready_names(case.stage)[0], outcome.version_before + 3)
        if case.dies:
            for child in swarm.volunteers:
                swarm.expect_exit(child)
        self._wait(lambda: self._has_fired(case), "the fault to happen")
        fired = json.loads(fired_path(self.plan, case.name).read_text())
        outcome.fired_step, victim = fired["step"], self.child(fired["peer"])
        swarm.children.exit_expected[:] = excused
        if case.dies:
            swarm.expect_exit(victim)
            stage = self.stage_of(victim)
            swarm.start_volunteer(self.invite, stage)
        self._wait(
            lambda: self.run.version() > outcome.fired_step + 1, f"step {outcome.fired_step + 2}"
        )
        if case.dies:
            self._wait(lambda: victim.exit_code() is not None, f"{victim.name} to be dead")
        outcome.version_after = self.run.version()
        outcome.said = self.notes()[said:]

    def stage_of(self, volunteer: Subprocess) -> int:
        words = [str(word) for word in volunteer.popen.args]  # type: ignore[union-attr]
        return int(words[words.index("--stage") + 1])

    def _has_fired(self, case: Case) -> bool:
        """Whether it has happened. A peer that got no such work in its step gets another step."""
        if self.has_fired(case.name):
            return True
        step = self._planned[-1]["step"]
        version = self.run.version()
        if step is not None and version > step:
            every = self.run.manifest.checkpoint_steps if case.anybody else 1
            self._planned[-1]["step"] = every * ((version + 2) // every + 1)
            self._write_plan()
        return False

    def _wait(self, ready: Any, what: str) -> None:
        wait_until(ready, self.run.swarm.children, CASE_SECONDS, what)

    def plan_for_anybody(
        self, name: str, phase: FaultPoint, action: FaultAction, seconds: float
    ) -> None:
        """The first peer that reaches the phase from now on."""
        self._plan_fault(name, ANY_PEER, phase, action, None, seconds)

    def plan_for(
        self, name: str, peer: str, phase: FaultPoint, action: FaultAction, seconds: float = 0.0
    ) -> None:
        """That peer, the next time it reaches the phase."""
        self._plan_fault(name, peer, phase, action, None, seconds)

    def has_fired(self, name: str) -> bool:
        return fired_path(self.plan, name).exists()

    def _plan(self, case: Case, victim: str, step: int | None) -> None:
        self._plan_fault(case.name, victim, case.phase, case.action, step, case.seconds)

    def _plan_fault(
        self, name: str, victim: str, phase: FaultPoint, action: FaultAction, step: int | None,
        seconds: float,
    ) -> None:  # fmt: skip
        fault = {
            "id": name, "peer": victim, "phase": phase, "action": action, "step": step,
            "seconds": seconds,
        }  # fmt: skip
        self._planned.append(fault)
        self._write_plan()

    def _write_plan(self) -> None:
        new = self.plan.with_suffix(".new")
        new.write_text(json.dumps({"faults": self._planned}))
        new.replace(self.plan)

    # ---- the end

    def finish(self) -> None:
        """Stop the run with a checkpoint of the version it has reached."""
        try:
            self.stopped_at = self.run.stop()
        except SwarmError as error:
            self.end_problem = str(error)
            self.stopped_at = self.run.version()

    def check(self, case: Case) -> None:
        """It struck where it should, the run went on, and no loss of these steps differs."""
        outcome = self.outcomes[case.name]
        assert outcome.problem == "", outcome.problem
        assert outcome.version_before <= outcome.fired_step <= outcome.version_after - 1
        assert [note for note in outcome.said if case.says in note] or not case.says
        steps = slice(outcome.version_before, outcome.version_after)
        expected = self.run.reference_losses(self.stopped_at)[steps]
        assert self.run.losses()[steps] == expected
