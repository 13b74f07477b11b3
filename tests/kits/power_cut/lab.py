"""Actions under which the power is cut, on a disk that forgets what was not synced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kits.power_cut import fuse

SERVER = Path(__file__).with_name("server.py")

NEVER = 10**9
"""More operations than any test does."""

SYNCED_ONLY = None
"""Instead of a seed: the cut leaves what was synced, and nothing else."""

FEW_SEEDS = (SYNCED_ONLY, 1, 2, 3)
"""Nothing, hardly any, half or nearly all of the unsynced names survive; of contents any part."""


@dataclass(frozen=True)
class Recovery:
    """What the disk tells when the power is back."""

    operations: int
    cut_before: str | None
    """The operation in front of which the power was cut; None when it was not."""


class PowerCutDisk:
    """A mounted file system; its content outlives cuts of the power, as far as it was synced."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir(parents=True)
        # In a session of its own: a signal to the test's group must not end it before it unmounts.
        self._server = subprocess.Popen(
            [sys.executable, str(SERVER), str(place)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": _tests()},
            start_new_session=True,
        )  # fmt: skip
        self.recover()

    def arm(self, after: int, victims: Sequence[int], seed: int | None) -> None:
        """Cut the power when so many more operations were done and another one begins.

        The victims die by SIGKILL. With a seed any part of what was not synced survives.
        """
        self._tell(do="arm", after=after, victims=list(victims), seed=seed)

    def cut(self, seed: int | None = SYNCED_ONLY, victims: Sequence[int] = ()) -> None:
        """Cut it now, unless it is cut already."""
        self._tell(do="cut", victims=list(victims), seed=seed)

    def recover(self) -> Recovery:
        """Mount what is left. The victims must have been waited for."""
        return self._tell(do="mount")

    def sync(self) -> None:
        """Make everything durable, as a minute of rest would."""
        self._tell(do="sync")

    def save(self) -> None:
        """Make everything durable, and remember it for `go_back`."""
        self.sync()
        self._tell(do="save")

    def go_back(self) -> None:
        """Take up the disk as it was saved, mounted."""
        self._tell(do="go back")
        self.recover()

    def operations(self) -> int:
        """Changes and syncs since the last mount."""
        return self._tell(do="count").operations

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        assert self._server.stdout is not None
        self._server.stdout.close()

    def _tell(self, **command: object) -> Recovery:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(command) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise AssertionError("the file system's process ended; see its traceback")
        return Recovery(**json.loads(answer))


def _tests() -> str:
    return str(Path(__file__).parents[2])


@contextmanager
def power_cut_disk(place: Path) -> Iterator[PowerCutDisk]:
    """A disk that is mounted there; skips the test on a machine that cannot mount it."""
    if reason := fuse.why_not_here():
        pytest.skip(reason)
    disk = PowerCutDisk(place)
    try:
        yield disk
    finally:
        disk.close()


def interrupted(
    disk: PowerCutDisk, action: Callable[[], object], after: int, seed: int | None
) -> Recovery:
    """Do it in a forked child, and cut the power after so many operations, or at its end.

    Afterwards the disk is mounted again. `cut_before` is None when the action ended first.
    """
    start, go = os.pipe()
    pid = os.fork()
    if not pid:
        _child(start, go, action)
    os.close(start)
    disk.arm(after, [pid], seed)
    os.write(go, b"!")
    os.close(go)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), "the action failed; see its traceback"
    ended = code == 0
    if ended:
        disk.cut(seed)
    found = disk.recover()
    return Recovery(found.operations, None) if ended else found


def _child(start: int, go: int, action: Callable[[], object]) -> None:
    """Never returns. Without `go` its end of file would never come."""
    code = 1
    try:
        os.close(go)
        if os.read(start, 1):
            action()
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def at_every_instant(
    disk: PowerCutDisk,
    action: Callable[[], object],
    check: Callable[[bool], object],
    seeds: Sequence[int | None] = (SYNCED_ONLY,),
    every: int = 1,
) -> int:
    """Cut the power before each operation of an action, and once at its end; the instants.

    Each time the disk begins as it is now. `check` sees what is left, and whether the action ended.
    """
    disk.save()
    instants = 0
    for seed in seeds:
        for after in range(0, NEVER, every):
            found = interrupted(disk, action, after, seed)
            ended = found.cut_before is None
            try:
                check(ended)
            except BaseException as error:
                error.add_note(f"the power was cut before {found.cut_before}, "
                               f"after {after} operations, seed {seed}")  # fmt: skip
                raise
            instants += 1
            disk.go_back()
            if ended:
                break
    return instants
