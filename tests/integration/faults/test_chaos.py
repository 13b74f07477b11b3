"""Random kills, freezes and partitions, and one killed coordinator, from a seed.

The seed is printed and can be given as SWARM_CHAOS_SEED. It determines what is tried; when that
happens also depends on the speed of the machine.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from kits.runs.fault_run import STEPS, TINY, FaultRun
from swarm_client.fault_injection.faults import FaultAction, FaultPoint
from swarm_coordinator.demo.subprocesses import Subprocess

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

SEED_VARIABLE = "SWARM_CHAOS_SEED"
PAUSE_SECONDS = (1.0, 6.0)
"""Pause between two faults."""
PEERS = 2
"""Peers of each stage at the start. A joining peer replaces every killed one."""
SECONDS_PER_FAULT = 10.0
"""Of the length of a run, for each fault that has to strike at least."""
LEAST_KINDS = 3
"""Kinds of faults that have to strike, the killed coordinator among them."""


def seed_of_this_run() -> int:
    given = os.environ.get(SEED_VARIABLE)
    return int(given) if given else random.SystemRandom().randrange(2**31)


class Chaos:
    """The faults of one run, chosen by a seeded generator."""

    def __init__(self, fault_run: FaultRun, seed: int) -> None:
        self.fault_run = fault_run
        self.random = random.Random(seed)
        self.log: list[str] = []
        self._struck: list[str] = []
        self._planned: dict[str, str] = {}
        """Kinds of the faults that a volunteer carries out itself, by their names in the plan."""
        self._thawing: list[threading.Timer] = []

    def inject_for(self, seconds: float) -> None:
        """Inject faults for so long, and until enough have struck: a slow machine needs longer."""
        end = time.monotonic() + seconds
        coordinator_dies_at = time.monotonic() + self.random.uniform(0.2, 0.6) * seconds
        coordinator_died = False
        kinds: list[Callable[[Subprocess], None]] = []
        while time.monotonic() < end or not self._enough_struck(seconds):
            victim = self._victim()
            if not coordinator_died and time.monotonic() >= coordinator_dies_at:
                self.kill_coordinator()
                coordinator_died = True
            elif victim is not None:
                # Each kind once, in any order, before one is repeated.
                kinds = kinds or [self.kill, self.freeze, self.partition, self.kill_somewhere]
                kinds.pop(self.random.randrange(len(kinds)))(victim)
            time.sleep(self.random.uniform(*PAUSE_SECONDS))
        for timer in self._thawing:
            timer.join()

    def _enough_struck(self, seconds: float) -> bool:
        struck = self.struck()
        return (
            struck.total() >= seconds / SECONDS_PER_FAULT
            and len(struck) >= LEAST_KINDS
            and struck["kill the coordinator"] == 1
        )

    def struck(self) -> Counter[str]:
        """Count the faults that have happened, by kind."""
        fired = [kind for name, kind in self._planned.items() if self.fault_run.has_fired(name)]
        return Counter(self._struck + fired)

    def _plan(
        self, kind: str, victim: Subprocess, phase: FaultPoint, action: FaultAction,
        seconds: float = 0.0,
    ) -> None:  # fmt: skip
        name = f"chaos-{len(self._planned) + 1}"
        self._planned[name] = kind
        self.fault_run.plan_for(name, victim.name, phase, action, seconds)

    def _say(self, text: str) -> None:
        self.log.append(f"version {self.fault_run.run.version()}: {text}")

    def _victim(self) -> Subprocess | None:
        """Return a volunteer whose stage has another one, so that the run need not roll back."""
        ready = [self.fault_run.ready_names(stage) for stage in range(self.fault_run.stages)]
        names = [name for of_stage in ready if len(of_stage) > 1 for name in of_stage]
        alive = [n for n in names if self.fault_run.child(n).exit_code() is None]
        return self.fault_run.child(self.random.choice(alive)) if alive else None

    def _replace(self, stage: int) -> None:
        self.fault_run.run.swarm.start_volunteer(self.fault_run.invite, stage)

    def kill(self, victim: Subprocess) -> None:
        self._say(f"kill {victim.name}")
        self.fault_run.run.swarm.expect_exit(victim)
        victim.kill()
        self._struck.append("kill")
        self._replace(self.fault_run.stage_of(victim))

    def kill_somewhere(self, victim: Subprocess) -> None:
        """Kill a volunteer at a phase of its step."""
        phases = [
            FaultPoint.FORWARD,
            FaultPoint.RECEIPT,
            FaultPoint.ALL_REDUCE,
            FaultPoint.NORM,
            FaultPoint.APPLY,
        ]
        phase = self.random.choice(phases)
        self._say(f"kill {victim.name} at its next {phase}")
        self.fault_run.run.swarm.expect_exit(victim)
        self._plan("kill at a phase", victim, phase, FaultAction.KILL)
        self._replace(self.fault_run.stage_of(victim))

    def freeze(self, victim: Subprocess) -> None:
        seconds = self.random.choice([1.0, 3.0, 8.0])
        self._say(f"freeze {victim.name} for {seconds:g} s")
        daemon = psutil.Process(victim.pid)
        whole = [daemon, *daemon.children(recursive=True)]
        for process in whole:
            _signal(process, signal.SIGSTOP)
        self._struck.append("freeze")

        def thaw() -> None:
            for process in whole:
                _signal(process, signal.SIGCONT)

        timer = threading.Timer(seconds, thaw)
        timer.start()
        self._thawing.append(timer)

    def partition(self, victim: Subprocess) -> None:
        seconds = self.random.choice([1.0, 3.0, 8.0])
        self._say(f"cut {victim.name} off for {seconds:g} s")
        self._plan("partition", victim, FaultPoint.FORWARD, FaultAction.PARTITION, seconds)

    def kill_coordinator(self) -> None:
        swarm = self.fault_run.run.swarm
        assert swarm.coordinator is not None
        self._say("kill the coordinator")
        swarm.expect_exit(swarm.coordinator)
        swarm.coordinator.kill()
        self._struck.append("kill the coordinator")
        time.sleep(self.random.uniform(0.0, 4.0))
        assert swarm.start_coordinator() == self.fault_run.invite


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


@pytest.mark.parametrize(
    ("number", "seconds"),
    [(0, 40.0), *(pytest.param(n, 75.0, marks=pytest.mark.nightly) for n in (1, 2, 3))],
)
def test_a_run_under_random_faults_equals_the_reference(
    make_run: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    number: int,
    seconds: float,
) -> None:
    seed = seed_of_this_run() + number
    with capsys.disabled():
        print(f"\nchaos: {SEED_VARIABLE}={seed}")
    fault_run = FaultRun(make_run(2, STEPS, **{**TINY, "checkpoint__every_steps": 5}), 2)
    fault_run.start(PEERS)
    chaos = Chaos(fault_run, seed)
    try:
        chaos.inject_for(seconds)
        version = fault_run.run.version()
        fault_run.run.wait_for_version(version + 3)
        fault_run.finish()
        assert fault_run.end_problem == "", fault_run.end_problem
        fault_run.run.assert_equals_reference(fault_run.stopped_at)
    except BaseException:
        print("\n".join([f"{SEED_VARIABLE}={seed}", *chaos.log, *fault_run.notes()[-60:]]))
        raise
