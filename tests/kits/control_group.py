"""A control group (Linux) of either version, in which a test starts processes. Needs root."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

MOUNT = Path("/sys/fs/cgroup")
PERIOD_MICROSECONDS = 100_000


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """Folders of one group, one for each controller."""

    folders: tuple[Path, ...]

    def output_of(self, command: Sequence[str]) -> str:
        """Run a command in the group and return what it prints."""
        enter = "".join(f'echo $$ > "{folder}/cgroup.procs" && ' for folder in self.folders)
        return subprocess.run(
            ["sh", "-c", f'{enter}exec "$@"', "sh", *command],
            check=True, stdout=subprocess.PIPE, text=True, timeout=60,
        ).stdout  # fmt: skip


@contextlib.contextmanager
def control_group(memory_bytes: int, cores: float) -> Iterator[ControlGroup]:
    """A group with limits of memory and of processor time; skips the test if there can be none."""
    made: dict[Path, None] = {}
    try:
        try:
            for controller, limits in _limits(memory_bytes, cores).items():
                folder = _parent(controller) / f"swarmtrain-test-{os.getpid()}"
                folder.mkdir(exist_ok=True)
                made[folder] = None
                for name, value in limits.items():
                    (folder / name).write_text(value)
        except OSError as error:
            pytest.skip(f"this kernel or container does not allow new control groups: {error}")
        yield ControlGroup(tuple(made))
    finally:
        for folder in made:
            _remove(folder)


def _is_second_version() -> bool:
    return (MOUNT / "cgroup.controllers").exists()


def _limits(memory_bytes: int, cores: float) -> dict[str, dict[str, str]]:
    """Return what is written for each controller, by the name of the file."""
    quota = round(cores * PERIOD_MICROSECONDS)
    if _is_second_version():
        return {
            "memory": {"memory.max": f"{memory_bytes}"},
            "cpu": {"cpu.max": f"{quota} {PERIOD_MICROSECONDS}"},
        }
    return {
        "memory": {"memory.limit_in_bytes": f"{memory_bytes}"},
        "cpu": {"cpu.cfs_period_us": f"{PERIOD_MICROSECONDS}", "cpu.cfs_quota_us": f"{quota}"},
    }


def _parent(controller: str) -> Path:
    """Return the group of this process; in version 2 with the controller for its children."""
    own = {
        name: path.lstrip("/")
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        for _, names, path in [line.split(":", 2)]
        for name in names.split(",")
    }
    if not _is_second_version():
        return MOUNT / controller / own.get(controller, "")
    parent = MOUNT / own[""]
    (parent / "cgroup.subtree_control").write_text(f"+{controller}")
    return parent


def _remove(folder: Path) -> None:
    """Remove the group. The kernel takes a moment to forget a process that has ended."""
    for _ in range(50):
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)
    raise AssertionError(f"{folder} still has processes")
