"""Subprocesses of the demo, the integration tests and the benchmarks.

Owns their lifetime: a log file and a session each, bounded waits, and termination by process id.
The client's own workers are started by `swarm_client.ipc.child_process`.

A subprocess has a session of its own, so that Ctrl-C in a terminal reaches only the parent, which
decides the order of termination. Linux terminates it when the parent dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from swarm_shared.base.errors import StorageError, SwarmError

COORDINATOR_MODULE = "swarm_coordinator"
CLIENT_MODULE = "swarm_client"

POLL_SECONDS = 0.05
"""Seconds between two polls of a condition."""
TAIL_BYTES = 64 * 2**10
"""Bytes read from the end of a log to show its last lines."""

_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True, slots=True)
class Subprocess:
    """One started program. Its process id is also the id of its session and process group."""

    name: str
    log: Path
    popen: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.popen.pid

    def exit_code(self) -> int | None:
        """Return the exit code; None while it runs, negative when a signal ended it."""
        return self.popen.poll()

    def wait(self, timeout_seconds: float) -> int | None:
        """Wait for the exit code; None when it still runs after the timeout."""
        try:
            return self.popen.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: int) -> None:
        """Send a signal to the process, not to its children, which it must end itself."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)

    def kill(self) -> None:
        """Kill the whole process group at once.

        Nothing is done when the process has ended, because its id may have been reused.
        """
        if self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.popen.wait()

    def last_lines(self, count: int = 20) -> list[str]:
        return last_lines(self.log, count)

    def describe_exit(self) -> str:
        code = self.exit_code()
        if code is None:
            return "is still running"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"exited with code {code}"


@dataclass(slots=True)
class Subprocesses:
    """The programs started by one caller; leaving the `with` block ends those still running."""

    grace_seconds: float = 10.0
    started: list[Subprocess] = field(default_factory=list)
    exit_expected: list[Subprocess] = field(default_factory=list)
    """Programs that the caller ends on purpose; their exit is not a failure."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> Subprocess:
        """Start a program in a session of its own, with its output appended to `log` and variables
        added to the environment.

        The calling thread must outlive it: Linux ends a child with the thread that started it.
        """
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                popen = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,
                    preexec_fn=_child_setup(os.getpid()),
                )
        except OSError as error:
            raise StorageError(
                f"{name} could not be started with its log in {log}: {error.strerror}; "
                "check that the folder can be written to and that the disk is not full"
            ) from error
        self.started.append(Subprocess(name, log, popen))
        return self.started[-1]

    def running(self) -> list[Subprocess]:
        return [child for child in self.started if child.exit_code() is None]

    def failed(self) -> list[Subprocess]:
        """Return the programs that failed and were not expected to end."""
        ended = [child for child in self.started if child.exit_code() not in (None, 0)]
        return [child for child in ended if child not in self.exit_expected]

    def wait(self, timeout_seconds: float) -> list[Subprocess]:
        """Wait for all programs to end by themselves; return those still running."""
        deadline = time.monotonic() + timeout_seconds
        while (running := self.running()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return running

    def end(self) -> None:
        """Send SIGTERM to all, the last started first, and kill those still running afterwards."""
        for child in reversed(self.started):
            child.signal(signal.SIGTERM)
        self.wait(self.grace_seconds)
        for child in reversed(self.started):
            child.kill()


def run_to_end(name: str, command: Sequence[str], timeout_seconds: float) -> str:
    """Run a program to its end and return its standard output.

    SwarmError with its last output when it fails or exceeds the timeout.
    """
    try:
        done = subprocess.run(
            list(command), stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_seconds,
            check=False, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SwarmError(
            f"{name} had not ended after {timeout_seconds:.0f} seconds and was stopped; "
            "the machine may be too busy: try again with nothing else running"
        ) from error
    if done.returncode != 0:
        output = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise SwarmError(f"{name} failed with exit code {done.returncode}: {output}")
    return done.stdout


def wait_until(
    ready: Callable[[], bool], children: Subprocesses, timeout_seconds: float, what: str
) -> None:
    """Poll until `ready()`; SwarmError when a program fails first or the timeout passes."""
    deadline = time.monotonic() + timeout_seconds
    while not ready():
        if failed := children.failed():
            raise SwarmError(failure_text(failed[0]))
        if time.monotonic() >= deadline:
            raise SwarmError(
                f"waited {timeout_seconds:.0f} seconds for {what} without success; "
                f"the logs are in {children.started[0].log.parent}"
                if children.started
                else f"waited {timeout_seconds:.0f} seconds for {what} without success"
            )
        time.sleep(POLL_SECONDS)


def failure_text(child: Subprocess) -> str:
    """Describe how a program ended, with the last lines of its log."""
    output = "\n".join(f"    {line}" for line in child.last_lines())
    return (
        f"{child.name} {child.describe_exit()} before the run was finished. "
        f"Last lines of {child.log}:\n{output or '    (it is empty)'}"
    )


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a text file, reading only its end; none if it does not exist."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return list(deque(text.splitlines(), maxlen=count))


def _child_setup(parent_pid: int) -> Callable[[], None]:
    """Return the function that a child runs between fork and exec."""
    libc = _LIBC

    def prepare() -> None:
        # Background jobs of a shell ignore Ctrl-C, and their children inherit that.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent_pid:  # the parent died between the fork and the line above
                os._exit(1)

    return prepare
