"""Real coordinators in processes of their own, and scripted volunteers that outlive them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from kits.coordinator.shell_world import Volunteer, crew_of
from kits.processes import has_ended
from swarm_coordinator.durability.journal_audit import StepShape, check_database
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.connection import DatabaseLocation
from swarm_coordinator.storage.database import open_for_reading
from swarm_coordinator.storage.records import read_restored
from swarm_shared.base.errors import NetworkError, ProtocolError
from swarm_shared.identity.invite import Invite
from swarm_shared.protocol import Apply, ClientMessage, CoordinatorMessage
from swarm_shared.run.manifest import Manifest

PROGRAM = Path(__file__).with_name("kill_program.py")


@dataclass
class Process:
    """One coordinator."""

    pid: int
    output: Path
    lab: Lab

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    async def ended(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        return int(await trio.to_thread.run_sync(self.lab.line))

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    async def serves(self) -> Invite:
        """Its invite; an AssertionError with what it said when it ended instead."""
        while True:
            for line in self.text().splitlines():
                if line.startswith("swarm1"):
                    return Invite.decode(line)
            if has_ended(self.pid):
                raise AssertionError(f"it ended: {self.text()}")
            await trio.sleep(0.01)


@dataclass
class Lab:
    """The parent of coordinators: one at a time; make several labs for several at once."""

    parent: subprocess.Popen[str]
    folder: Path
    started: int = 0

    def line(self) -> str:
        assert self.parent.stdout is not None
        found = self.parent.stdout.readline()
        if not found:
            raise AssertionError("the parent of the coordinators has ended")
        return found.strip()

    async def start(
        self, folder: RunFolder, *more: str, boundary: str | None = None, passing: int = 1
    ) -> Process:
        """`swarm-coordinator start`, which may be killed at a boundary of a commit."""
        self.started += 1
        output = self.folder / f"start-{self.started}.out"
        question = {
            "words": ["start", str(folder.path), *more], "output": str(output),
            "boundary": boundary, "passing": passing,
        }  # fmt: skip
        assert self.parent.stdin is not None
        self.parent.stdin.write(json.dumps(question) + "\n")
        self.parent.stdin.flush()
        pid = int(await trio.to_thread.run_sync(self.line))
        return Process(pid, output, self)


@contextmanager
def coordinators(folder: Path) -> Iterator[Lab]:
    folder.mkdir(parents=True, exist_ok=True)
    parent = subprocess.Popen(
        [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield Lab(parent, folder)
    finally:
        # The whole session: it, and a coordinator that still runs.
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


# ---------------------------------------------------------------- volunteers


@dataclass
class Lasting(Volunteer):
    """A volunteer that comes back for as long as the test goes on, and keeps what it was told."""

    told: list[tuple[int, int]] = field(default_factory=list)
    """Steps it was told to apply, with the attempt."""
    attached: Callable[[int], None] = lambda generation: None

    async def come_back(self) -> None:
        while not self.goodbyes:
            try:
                await self.take_part()
            except* (NetworkError, ProtocolError):
                pass
            await trio.sleep(0.02)

    def _answers(self, message: CoordinatorMessage) -> list[ClientMessage]:
        if isinstance(message, Apply):
            self.told.append((message.step, message.attempt))
        answers = super()._answers(message)
        if message.kind == "welcome":
            self.attached(self.welcomes[-1].generation)
        return answers


def lasting_crew(invite: Invite, manifest: Manifest, folder: Path) -> list[Lasting]:
    return crew_of(invite, manifest, folder, Lasting)


def check_nothing_forgotten(
    place: DatabaseLocation, manifest: Manifest, crew: list[Lasting]
) -> int:
    """The database is whole and knows every step that anybody was told to apply; its version."""
    with open_for_reading(place) as connection:
        shape = StepShape(manifest.stage_count, manifest.training.microbatches_per_step)
        assert check_database(connection, shape) == []
        attempts: Mapping[int, int] = dict(
            connection.execute(
                "SELECT step, attempt FROM applied_steps WHERE superseded_by IS NULL"
            ).fetchall()
        )
        version = read_restored(connection).version
    for volunteer in crew:
        for step, attempt in volunteer.told:
            assert attempts.get(step) == attempt, f"step {step} was applied and is not remembered"
    assert sorted(attempts) == list(range(1, version + 1))
    return version
