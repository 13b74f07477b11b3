"""A store in a process of its own that is killed, and a simulated swarm that goes on with it.

The simulated world (`swarm_world`) runs the real core and checks at every record and message that
nothing counts twice, that nothing is applied before it is durable, and that the run ends. Here its
records go to a real store in a forked child, which dies by SIGKILL at a chosen boundary of a
commit or at any instant. The core's memory dies with it. What the volunteers hold lives on, so
that a step that some of them applied and the database forgot would be seen.

Forked rather than started: what a child has to import is there already.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import ClassVar

import trio
from pydantic import TypeAdapter

from kits.swarm_world.checks import check_end
from kits.swarm_world.facts import Fault, Options, Violation
from kits.swarm_world.world import SimStore, World
from swarm_coordinator.core.events import (
    AppliedStep,
    CheckpointRecord,
    Command,
    EvaluationRecord,
    Event,
    Note,
    Persist,
    Restored,
    RolledBack,
    RunFinished,
)
from swarm_coordinator.durability.journal_audit import StepShape, check_database, read_decision
from swarm_coordinator.storage import store as store_module
from swarm_coordinator.storage.connection import Connection
from swarm_coordinator.storage.journal import JournalRecord
from swarm_coordinator.storage.records import read_restored
from swarm_coordinator.storage.store import Store
from swarm_shared.base.errors import LeadershipError

LONGEST_SECONDS = 0.05
"""A decision that took longer was held up by something else, and tells nothing."""

BOUNDARIES = ("begin", "written", "committed", "answered")

DECISIONS: dict[str, TypeAdapter[JournalRecord]] = {
    kind.__name__: TypeAdapter(kind)
    for kind in (AppliedStep, RolledBack, CheckpointRecord, EvaluationRecord, RunFinished)
}

OpenStore = Callable[[], Store]
Reading = Callable[[], AbstractContextManager[Connection]]


class Dead(Exception):
    """The child was killed before it answered."""


@dataclass
class Kill:
    """When a child dies: at the nth passing of a boundary, or in the middle of the nth decision,
    after a share of the time that decisions take."""

    boundary: str | None = None
    passing: int = 1
    after_share: float | None = None


class StoreProcess:
    """A forked child that has opened the store and does one thing after the other."""

    typical_seconds: ClassVar[float] = 0.002
    """Of a decision, as measured: it depends on the machine, the store and what else runs."""

    def __init__(self, open_store: OpenStore, kill: Kill) -> None:
        self._kill, self._decisions = kill, 0
        here, there = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(here[1])
            os.close(there[0])
            _child(open_store, here[0], there[1], kill)
        os.close(here[0])
        os.close(there[1])
        self._questions = os.fdopen(here[1], "w", buffering=1)
        self._answers = os.fdopen(there[0])
        self._ended = False

    def ask(self, what: str, content: object = None) -> int:
        """Its answer; Dead when it was killed before or while it worked."""
        self._decisions += what in DECISIONS
        share = self._kill.after_share if self._decisions == self._kill.passing else None
        asked_at = time.perf_counter()
        try:
            self._questions.write(json.dumps([what, content]) + "\n")
            if share is not None and what in DECISIONS:
                time.sleep(share * self.typical_seconds)
                os.kill(self.pid, signal.SIGKILL)
            answer = self._answers.readline()
            if share is None and what in DECISIONS:
                taken = min(time.perf_counter() - asked_at, LONGEST_SECONDS)
                StoreProcess.typical_seconds += 0.2 * (taken - self.typical_seconds)
        except BrokenPipeError:
            answer = ""
        if not answer.endswith("\n"):
            raise Dead
        return int(answer)

    def end(self) -> int:
        """Wait for it; the signal that it died of, or 0 when it ended in order."""
        if not self._ended:
            self._ended = True
            for pipe in (self._questions, self._answers):
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
            _, status = os.waitpid(self.pid, 0)
            self.died_of = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
                raise AssertionError("the child failed; see its traceback")
        return self.died_of


def _child(open_store: OpenStore, questions: int, answers: int, kill: Kill) -> None:
    """Never returns. Notes go along with decisions, so that commits hold several records."""
    code = 1
    try:
        passed: Counter[str] = Counter()

        def commit_hook(name: str) -> None:
            passed[name] += 1
            if name == kill.boundary and passed[name] == kill.passing:
                os.kill(os.getpid(), signal.SIGKILL)

        store_module.commit_hook = commit_hook
        store = open_store()
        with os.fdopen(questions) as lines, os.fdopen(answers, "w", buffering=1) as out:
            for line in lines:
                what, content = json.loads(line)
                answer = 0
                if what == "generation":
                    answer = _lead(store)
                else:
                    store.post(Note(f"about to write a {what}"))
                    trio.run(store.write, DECISIONS[what].validate_python(content))
                    store.post(Note(f"wrote a {what}"))
                out.write(f"{answer}\n")
        store.close()
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def _in_order(decision: JournalRecord | None) -> JournalRecord | None:
    """Shares have no order of their own."""
    if isinstance(decision, AppliedStep):
        return replace(decision, shares=tuple(sorted(decision.shares, key=astuple)))
    return decision


def _comparable(restored: Restored) -> Restored:
    return replace(restored, last_applied=_in_order(restored.last_applied))  # type: ignore[arg-type]


def _lead(store: Store) -> int:
    """As soon as a server has noticed that the one before is dead."""
    while True:
        try:
            return store.next_generation()
        except LeadershipError:
            time.sleep(0.005)


class Killed(Exception):
    """The store's process died under a record; the core's memory is gone with it."""


@dataclass
class Tally:
    kills: Counter[str] = field(default_factory=Counter)
    """By the outcome: whether the record under way was found to be durable."""
    starts: int = 0


class KilledWorld(World):
    """A world whose records are durable only when the child says so."""

    def __init__(
        self,
        options: Options,
        seed: int,
        open_store: OpenStore,
        reading: Reading,
        next_kill: Callable[[], Kill],
        faults: tuple[Fault, ...] = (),
    ) -> None:
        self._open_store, self._reading, self._next_kill = open_store, reading, next_kill
        self._process: StoreProcess | None = None
        self._under_way: JournalRecord | None = None
        self._acknowledged: list[JournalRecord] = []
        self._generations: list[int] = []
        self._shape = StepShape(options.stages, options.microbatches)
        self.tally = Tally()
        super().__init__(options, seed, faults)

    # ---- the coordinator, with a store that dies

    def start_coordinator(self) -> None:
        if self.run_state is not None and not self.stopped:
            return
        if self._process is not None:
            self._process.end()
        self._process = self.start_process(self._open_store)
        self.tally.starts += 1
        try:
            generation = self._process.ask("generation")
        except Dead:
            self.died("start")
            self.later(0.5, self.start_coordinator)
            return
        if self._generations and generation <= self._generations[-1]:
            raise Violation(f"generation {generation} after {self._generations}")
        self._generations.append(generation)
        self._read_back()
        self.generation = generation - 1
        super().start_coordinator()

    def start_process(self, open_store: OpenStore) -> StoreProcess:
        return StoreProcess(open_store, self._next_kill())

    def died(self, what: str) -> None:
        assert self._process is not None
        if self._process.end() != signal.SIGKILL:
            raise Violation("the store's process ended by itself")
        self.tally.kills[what] += 1
        self._process = None

    def _read_back(self) -> None:
        """The database is whole and says what was acknowledged, and at most what was under way."""
        with self._reading() as connection:
            if findings := check_database(connection, self._shape):
                raise Violation(f"the database is damaged: {findings}")
            entries = connection.execute(
                "SELECT kind, row_id FROM journal WHERE kind NOT IN ('begun', 'start') "
                "ORDER BY sequence"
            ).fetchall()
            found = [read_decision(connection, kind, row) for kind, row in entries]
            restored = read_restored(connection)
        expected: list[JournalRecord | None] = list(self._acknowledged)
        if self._under_way is not None:
            durable = len(found) > len(expected)
            self.tally.kills["durable" if durable else "not durable"] += 1
            if durable:
                expected.append(self._under_way)
                self._acknowledged.append(self._under_way)
        if list(map(_in_order, found)) != list(map(_in_order, expected)):
            raise Violation(f"acknowledged {expected[-3:]}, and the database has {found[-3:]}")
        self._under_way = None
        self.store = SimStore()
        for decision in found:
            self.store.write(decision)
        remembered = self.store.restore(restored.generation, self.now)
        if _comparable(restored) != _comparable(remembered):
            raise Violation(f"{restored} is not {remembered}")

    def deliver(self, event: Event) -> None:
        try:
            super().deliver(event)
        except Killed:
            self.died("decision")
            self.crash(back_after=self.rng.choice([0.5, 2.0]))

    def _execute(self, command: Command) -> None:
        super()._execute(command)
        if isinstance(command, Persist):
            # It is in `store` already, where the world's checks look; nothing was said of it yet.
            record = command.record
            assert self._process is not None
            self._under_way = record
            try:
                self._process.ask(type(record).__name__, asdict(record))
            except Dead:
                raise Killed from None
            self._acknowledged.append(record)
            self._under_way = None

    def close(self) -> None:
        if self._process is not None:
            self._process.end()


def run_to_the_end(world: KilledWorld) -> None:
    """Every fault of the world's own, every kill, and an end that is what one machine computes."""
    try:
        world.later(world.calm_at + 1.0, world.calm)
        world.run(world.calm_at + 3000.0)
        check_end(world)
    finally:
        world.close()
    # One more start, of a run that is over: what was acknowledged is still there.
    world._next_kill = Kill
    world.stopped, world.run_state = False, None
    try:
        world.start_coordinator()
    finally:
        world.close()


@dataclass
class RandomKills:
    """Kills at instants of which most fall into a commit, as far as one can aim."""

    rng: random.Random
    left: int

    def __call__(self) -> Kill:
        if not self.left:
            return Kill()
        self.left -= 1
        passing = self.rng.randint(1, 3)
        if self.rng.random() < 0.15:
            return Kill(self.rng.choice(BOUNDARIES), passing)
        return Kill(None, passing, after_share=1.5 * self.rng.random())
