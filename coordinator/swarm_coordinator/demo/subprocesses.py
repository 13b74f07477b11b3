"""Starting other programs of this project, watching them, and making sure that they end.

Owns: the life of child processes that the demo, the integration tests and the benchmarks run:
a log file each, a session of their own, bounded waits, termination by process id. Does not own
what they run. The client's own workers are not its business (`swarm_client.ipc.child_process`).

A child gets a session of its own so that Ctrl-C in a terminal reaches only us and we decide in
which order everybody leaves; and Linux is asked to terminate it when we die without a word.
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
from types import TracebackType
from typing import Self

from swarm_shared.base.errors import StorageError, SwarmError

COORDINATOR_MODULE = "swarm_coordinator"
CLIENT_MODULE = "swarm_client"

POLL_SECONDS = 0.05
TAIL_BYTES = 64 * 2**10
"""How much of the end of a log is read to show its last lines, however long the log is."""

_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """The words that run one of our modules with this very interpreter and its packages."""
    return (sys.executable, "-m", module, *arguments)


@dataclass(frozen=True, slots=True)
class Subprocess:
    """One running program. Its process id is also the id of its session and process group."""

    name: str
    log: Path
    popen: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.popen.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it, as in `subprocess`."""
        return self.popen.poll()

    def wait(self, timeout_seconds: float) -> int | None:
        """Its exit code, or None when it still runs after that long."""
        try:
            return self.popen.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: int) -> None:
        """To the process itself, not to its children: how it ends them is part of what we run."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)

    def kill(self) -> None:
        """At once and with everything in its process group; for tests of sudden death, too.

        One that has ended is left alone: its number may belong to a stranger by now.
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
    """The programs that one caller started; leaving the `with` block ends those still running."""

    grace_seconds: float = 10.0
    started: list[Subprocess] = field(default_factory=list)
    exit_expected: list[Subprocess] = field(default_factory=list)
    """These may end as they like: it is somebody's purpose."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end(self.grace_seconds)

    def start(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> Subprocess:
        """Run `command` with output appended to `log`; `environment` is added to our own."""
        child = start(name, command, log, environment)
        self.started.append(child)
        return child

    def running(self) -> list[Subprocess]:
        return [child for child in self.started if child.exit_code() is None]

    def failed(self) -> list[Subprocess]:
        """Those that have ended with anything but success and without an expect_exit."""
        ended = [child for child in self.started if child.exit_code() not in (None, 0)]
        return [child for child in ended if child not in self.exit_expected]

    def wait(self, timeout_seconds: float) -> list[Subprocess]:
        """Wait for all to end by themselves; returns those that have not in that time."""
        deadline = time.monotonic() + timeout_seconds
        while (running := self.running()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return running

    def end(self, grace_seconds: float) -> None:
        """Ask everybody to leave (SIGTERM), the last started first, then kill who has not."""
        for child in reversed(self.started):
            child.signal(signal.SIGTERM)
        self.wait(grace_seconds)
        for child in reversed(self.started):
            child.kill()


def start(
    name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Subprocess:
    """Start one program in a session of its own, with its output appended to `log`.

    Call it from a thread that lasts: Linux ends the child when the thread that started it ends.
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
    return Subprocess(name, log, popen)


def run_to_end(
    name: str, command: Sequence[str], timeout_seconds: float, *, show_lines: int = 5
) -> str:
    """Run a program that ends by itself and return what it printed on standard output.

    A SwarmError with its own last words when it fails or takes longer than that.
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
        words = "\n".join((done.stderr or done.stdout).strip().splitlines()[-show_lines:])
        raise SwarmError(f"{name} failed with exit code {done.returncode}: {words}")
    return done.stdout


def wait_until(
    ready: Callable[[], bool], children: Subprocesses, timeout_seconds: float, what: str
) -> None:
    """Poll until `ready()`; a SwarmError when a child fails first or the time is over."""
    deadline = time.monotonic() + timeout_seconds
    while not ready():
        if failed := children.failed():
            raise SwarmError(failure_text(failed[0]))
        if time.monotonic() >= deadline:
            raise SwarmError(
                f"waited {timeout_seconds:.0f} seconds for {what} in vain; "
                f"the logs are in {children.started[0].log.parent}"
                if children.started
                else f"waited {timeout_seconds:.0f} seconds for {what} in vain"
            )
        time.sleep(POLL_SECONDS)


def failure_text(child: Subprocess, lines: int = 20) -> str:
    """Which program ended how, and the last lines that it wrote."""
    words = "\n".join(f"    {line}" for line in child.last_lines(lines))
    return (
        f"{child.name} {child.describe_exit()} before the run was finished. "
        f"Last lines of {child.log}:\n{words or '    (it wrote nothing)'}"
    )


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a text file, reading only its end; none when there is no such file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return list(deque(text.splitlines(), maxlen=count))


def _child_setup(parent_pid: int) -> Callable[[], None]:
    """What a child does before it becomes the program it is started for."""
    libc = _LIBC

    def prepare() -> None:
        # A shell's background jobs ignore Ctrl-C, and whatever they start inherits that.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent_pid:  # we died between the fork and the line above
                os._exit(1)

    return prepare
