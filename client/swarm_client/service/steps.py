"""The steps of installing a service: described before they are carried out.

Owns files and links; other programs are called by a `RunCommand`. Independent of the service
manager.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm_shared.base.atomic_file import (
    PUBLIC_MODE,
    make_folder,
    storage_error,
    write_atomically,
)
from swarm_shared.base.errors import DaemonError, StorageError

COMMAND_SECONDS = 150.0
"""Timeout of a command. A service manager answers when the service has started or stopped; both may
take a minute."""


BUSY_SECONDS = 2.0
"""Pause before a command is repeated of a manager that is busy."""
BUSY_TRIES = 50
"""A service may take 80 s to end (ExitTimeOut), and its manager some more."""


@dataclass(frozen=True, slots=True)
class MakeFolder:
    """A folder that only its owner may enter, unless it exists."""

    path: Path

    def __str__(self) -> str:
        return f"make {self.path}"


@dataclass(frozen=True, slots=True)
class WriteFile:
    path: Path
    content: str

    def __str__(self) -> str:
        return f"write {self.path}"


@dataclass(frozen=True, slots=True)
class MakeLink:
    path: Path
    target: Path

    def __str__(self) -> str:
        return f"link {self.path} to {self.target}"


@dataclass(frozen=True, slots=True)
class Remove:
    """A file, a link, or with `whole` a folder with its content. It need not exist."""

    path: Path
    whole: bool = False

    def __str__(self) -> str:
        return f"remove {self.path}{' and everything in it' if self.whole else ''}"


@dataclass(frozen=True, slots=True)
class RunCommand:
    command: Sequence[str]
    may_fail: bool = False
    """The object of the command may not exist any more."""
    busy_codes: tuple[int, ...] = ()
    """Exit codes with which the manager says that it is still ending what the command replaces."""

    def __str__(self) -> str:
        return f"run {shlex.join(self.command)}"


Step = MakeFolder | WriteFile | MakeLink | Remove | RunCommand


def carry_out(
    steps: Sequence[Step],
    report: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Carry the steps out in order, until one fails.

    StorageError when a file cannot be written or removed, DaemonError when a program fails.
    """
    for step in steps:
        report(str(step))
        _carry_out(step, sleep)


def _carry_out(step: Step, sleep: Callable[[float], None]) -> None:
    match step:
        case MakeFolder(path):
            _make_folder(path, 0o700)
        case WriteFile(path, content):
            _make_folder(path.parent)
            write_atomically(path, content.encode(), PUBLIC_MODE)
        case MakeLink(path, target):
            _make_folder(path.parent)
            _remove(path, whole=False)
            try:
                path.symlink_to(target)
            except OSError as error:
                raise storage_error(path, error) from error
        case Remove(path, whole):
            _remove(path, whole=whole)
        case RunCommand():
            _run(step, sleep)


def _make_folder(path: Path, mode: int = 0o777) -> None:
    try:
        make_folder(path, mode)
    except OSError as error:
        raise storage_error(path, error) from error


def _remove(path: Path, *, whole: bool) -> None:
    try:
        if whole and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{path} cannot be removed: {error.strerror}") from error


def _run(step: RunCommand, sleep: Callable[[float], None]) -> None:
    words = shlex.join(step.command)
    for left in reversed(range(BUSY_TRIES)):
        try:
            done = subprocess.run(
                step.command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=COMMAND_SECONDS, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            if step.may_fail:
                return
            raise DaemonError(f"`{words}` could not be carried out: {error}") from error
        if done.returncode == 0 or step.may_fail:
            return
        if done.returncode not in step.busy_codes or not left:
            break
        sleep(BUSY_SECONDS)
    output = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
    raise DaemonError(f"`{words}` failed: {output}")
