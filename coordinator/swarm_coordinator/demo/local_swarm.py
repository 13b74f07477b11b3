"""A whole swarm on this machine: one coordinator and volunteers, each a real process.

Owns how they are started, where their logs and homes are, and the wait for the end of the run. Used
by the demo, the integration tests and the benchmarks. The programs are those that organisers and
volunteers start by hand, and they communicate over the network.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm_coordinator.demo.subprocesses import (
    CLIENT_MODULE,
    COORDINATOR_MODULE,
    Subprocess,
    Subprocesses,
    failure_text,
    run_to_end,
    wait_until,
)
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.status.status_file import read_status
from swarm_coordinator.storage.history import History, history
from swarm_shared.base.errors import SwarmError
from swarm_shared.host.python_modules import module_command

COORDINATOR_NAME = "coordinator"

COORDINATOR_START_SECONDS = 60.0
"""Seconds for the coordinator to start serving."""
INVITE_SECONDS = 60.0
"""Seconds for the `invite` command."""

EXIT_SECONDS = 60.0
"""Seconds for processes to end by themselves after the last step."""

STOP_SECONDS = 20.0
"""Seconds for the coordinator to finish a step and store a checkpoint before it ends."""

WATCH_SECONDS = 0.25
"""Seconds between two looks at the run's progress."""


@dataclass(slots=True)
class LocalSwarm:
    """The processes of one run folder. `children` must be entered and left by the caller."""

    run_dir: Path
    children: Subprocesses
    threads: int = 1
    """Compute threads of each volunteer."""
    device: str = "cpu"
    """Device of each volunteer, which they may share."""
    volunteers: list[Subprocess] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    """Variables added to the environment of processes started from now on."""
    prefix: tuple[str, ...] = ()
    """Words put before the commands of processes started from now on, for another network
    namespace."""
    coordinator: Subprocess | None = None

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.run_dir)

    def start_coordinator(self) -> str:
        """Start it, wait until it serves, and return the invite."""
        before = _modified(self.folder.status)
        arguments = ("start", str(self.run_dir), "--http", "")
        self.coordinator = self.children.start(
            COORDINATOR_NAME,
            (
                *self.prefix,
                *module_command(COORDINATOR_MODULE, *arguments),
            ),
            self._log(COORDINATOR_NAME),
            self._environment(),
        )
        wait_until(
            lambda: _modified(self.folder.status) != before,
            self.children,
            COORDINATOR_START_SECONDS,
            "the coordinator to serve the run",
        )
        return self.invite()

    def invite(self) -> str:
        """Return the invite, from the `invite` command."""
        command = module_command(COORDINATOR_MODULE, "invite", str(self.run_dir))
        words = run_to_end("swarm-coordinator invite", command, INVITE_SECONDS).split()
        invites = [word for word in words if word.startswith("swarm1")]
        if not invites:
            raise SwarmError("`swarm-coordinator invite` printed no invite; see the run's log")
        return invites[0]

    def start_volunteer(self, invite: str, stage: int | None = None) -> Subprocess:
        """Start one more volunteer with its own home, and so its own identity."""
        name = f"volunteer-{len(self.volunteers) + 1}"
        arguments = ["join", invite, "--home", str(self.home(name)), "--device", self.device]
        arguments += ["--threads", str(self.threads), "--name", name]
        if stage is not None:
            arguments += ["--stage", str(stage)]
        command = (*self.prefix, *module_command(CLIENT_MODULE, *arguments))
        child = self.children.start(name, command, self._log(name), self._environment())
        self.volunteers.append(child)
        return child

    def home(self, name: str) -> Path:
        return self.run_dir / "volunteers" / name

    def history(self) -> History | None:
        """Read the run's history; None while there is no database yet."""
        return history(self.folder.database) if self.folder.database.exists() else None

    def status(self) -> Mapping[str, Any]:
        """What the coordinator says about itself, at most a second old; empty before it does."""
        document = read_status(self.folder.status)
        return {} if document is None else document.model_dump(mode="json")

    def expect_exit(self, child: Subprocess) -> None:
        """Allow a process to end before the run does, because the caller ends it on purpose."""
        self.children.exit_expected.append(child)

    def watch(
        self, on_change: Callable[[History, Mapping[str, Any]], None] = lambda seen, status: None
    ) -> History:
        """Follow the run until it is finished; SwarmError when a process ends earlier."""
        while True:
            # Exit codes are read before the database: the last step may be written in between.
            ended = [
                child
                for child in self.children.started
                if child.exit_code() is not None and child not in self.children.exit_expected
            ]
            seen = self.history()
            if seen is not None:
                on_change(seen, self.status())
                if seen.restored.finished:
                    return seen
            if ended:
                raise SwarmError(failure_text(ended[0]))
            time.sleep(WATCH_SECONDS)

    def stop(self) -> None:
        """Stop the coordinator in order, with a checkpoint, and then all other processes."""
        if self.coordinator is not None:
            self.coordinator.signal(signal.SIGTERM)
            self.coordinator.wait(STOP_SECONDS)
        self.children.end()

    def wait_for_exit(self) -> list[Subprocess]:
        """Wait for all processes to end; return those still running and those that failed."""
        still_running = self.children.wait(EXIT_SECONDS)
        return still_running + self.children.failed()

    def _log(self, name: str) -> Path:
        # Not .log, which the programs may use for their own log files.
        return self.folder.log / f"{name}.out"

    def _environment(self) -> dict[str, str]:
        # Libraries under torch otherwise start a thread per core in every process.
        count = str(self.threads)
        quiet = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "PYTHONUNBUFFERED": "1"}
        # Measurements and tests run at normal priority.
        quiet["SWARM_NICE"] = "0"
        return {**quiet, **self.environment}


def _modified(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
