"""Limits of the control groups that this process is in (Linux), in both versions of the interface.

A group's limit covers the groups below it, so the limits of all its parents count as well. A
container sees its own group as the root, and what lies above it not at all.

Source: the kernel's Documentation/admin-guide, cgroup-v2.rst (`memory.max`, `cpu.max`) and
cgroup-v1/memory.rst; proc(5) for `mountinfo` and `cgroup`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

OF_THIS_PROCESS = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A group's limit of memory, and what its processes have taken of it."""

    limit_bytes: int
    used_bytes: int
    """Without pages of files that were not read lately: the kernel drops those when it is asked for
    memory. The same count is Kubernetes' working set."""

    @property
    def available_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


def memory_limits(below_bytes: int, process: Path = OF_THIS_PROCESS) -> Iterator[MemoryLimit]:
    """Yield the limits below so many bytes of memory that hold for the process; none on other
    systems."""
    for folder in _folders("memory", process):
        # A process that takes more is ended, or made to wait until others give memory back.
        limits = _numbers(folder, "memory.max", "memory.high", "memory.limit_in_bytes")
        # What is used takes the kernel ten times as long to say.
        if limits and min(limits) < below_bytes:
            used = _numbers(folder, "memory.current", "memory.usage_in_bytes")
            used_bytes = used[0] - _inactive_file_bytes(folder) if used else 0
            yield MemoryLimit(min(limits), max(0, used_bytes))


def core_limits(process: Path = OF_THIS_PROCESS) -> Iterator[float]:
    """Yield the limits of processor seconds per second that hold for the process."""
    for folder in _folders("cpu", process):
        both = _text(folder / "cpu.max").split()  # of both, in microseconds
        quota_and_period = [int(one) for one in both if one.isdecimal()] or _numbers(
            folder, "cpu.cfs_quota_us", "cpu.cfs_period_us"
        )
        if len(quota_and_period) == 2 and min(quota_and_period) > 0:
            yield quota_and_period[0] / quota_and_period[1]


@cache
def _folders(controller: str, process: Path) -> tuple[Path, ...]:
    """Return the process's group of a controller and the group's parents, as they are mounted.

    Where both versions are mounted, a controller belongs to one of them.
    """
    paths = {
        controllers: path
        for line in _text(process / "cgroup").splitlines()
        for _, controllers, path in [(*line.split(":", 2), "", "")[:3]]
    }
    second: tuple[Path, ...] = ()
    for line in _text(process / "mountinfo").splitlines():
        # 36 35 98:0 /root /mount options [tags] - type source options
        place, _, filesystem = line.partition(" - ")
        fields, (kind, _, options) = place.split(" "), (*filesystem.split(" ", 2), "", "")[:3]
        if len(fields) < 5:
            continue
        root, mount = _unescaped(fields[3]), Path(_unescaped(fields[4]))
        if kind == "cgroup" and controller in options.split(","):
            own = [path for names, path in paths.items() if controller in names.split(",")]
            return _with_parents(mount, root, own[0] if own else "/")
        if kind == "cgroup2":
            second = _with_parents(mount, root, paths.get("", "/"))
    return second


def _with_parents(mount: Path, root: str, own: str) -> tuple[Path, ...]:
    """Return the folders of a group and of its parents up to the one that is mounted."""
    path = PurePosixPath(own)
    # A group outside of what is mounted (a container without a namespace of groups): then the root
    # of the mount is the container's own.
    inside = path.is_relative_to(root) and ".." not in path.parts
    folder = mount / path.relative_to(root) if inside else mount
    return (folder, *(one for one in folder.parents if one.is_relative_to(mount)))


def _unescaped(path: str) -> str:
    """Return a path of mountinfo, where blanks are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _inactive_file_bytes(folder: Path) -> int:
    """Return the bytes of pages that can be dropped, of the groups below as well."""
    # Version 1 counts a group alone, and with the groups below it.
    found = re.findall(r"^(?:total_)?inactive_file (\d+)$", _text(folder / "memory.stat"), re.M)
    return max(map(int, found), default=0)


def _numbers(folder: Path, *names: str) -> list[int]:
    """Return the numbers in these files; none of a file that says `max` or is not there."""
    texts = (_text(folder / name).strip() for name in names)
    return [int(text) for text in texts if text.isdecimal()]


def _text(path: Path) -> str:
    """Return what the file has; nothing if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
