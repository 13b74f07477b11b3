"""The steps of installing a service: described before they are carried out.

Owns files and links; other programs are called by a `RunCommand`. Independent of the service
manager.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm_shared.base.atomic_file import PUBLIC_MODE, storage_error, write_atomically
from swarm_shared.base.errors import DaemonError, StorageError

COMMAND_SECONDS = 150.0
"""Timeout of a command. A service manager answers when the service has started or stopped; both may
take a minute."""


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

    def __str__(self) -> str:
        return f"run {shlex.join(self.command)}"


Step = WriteFile | MakeLink | Remove | RunCommand


def carry_out(steps: Sequence[Step], report: Callable[[str], None]) -> None:
    """Carry the steps out in order, until one fails.

    StorageError when a file cannot be written or removed, DaemonError when a program fails.
    """
    for step in steps:
        report(str(step))
        _carry_out(step)


def _carry_out(step: Step) -> None:
    match step:
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
        case RunCommand(words, may_fail):
            _run(words, may_fail=may_fail)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
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


def _run(words: Sequence[str], *, may_fail: bool) -> None:
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=COMMAND_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        if may_fail:
            return
        raise DaemonError(f"`{shlex.join(words)}` could not be carried out: {error}") from error
    if done.returncode != 0 and not may_fail:
        output = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise DaemonError(f"`{shlex.join(words)}` failed: {output}")
