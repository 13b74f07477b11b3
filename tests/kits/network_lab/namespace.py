"""Network namespaces: each is one machine of the lab as far as its network is concerned.

Names carry the process that made them, and its start time, so that a later lab can tell those
that a killed test left behind from those in use. All interfaces are made inside namespaces:
nothing but the names is ever visible outside, and they go with their namespace.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kits.network_lab.commands import LabError, run_tool

FOLDER = Path("/run/netns")
PREFIX = "swarmlab"
END_SECONDS = 5.0

_CLONE_NEWNET = 0x40000000  # include/uapi/linux/sched.h
_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)-\d+-.+")
_serial = itertools.count(1)


class Namespace:
    def __init__(self, label: str) -> None:
        pid = os.getpid()
        self.name = f"{PREFIX}-{pid}-{_start_time(pid)}-{next(_serial)}-{label}"
        run_tool(["ip", "netns", "add", self.name])

    @property
    def prefix(self) -> tuple[str, ...]:
        """Put before a command, it runs inside. The process keeps its id: `ip` becomes it."""
        return ("ip", "netns", "exec", self.name)

    def ip(self, *lines: str) -> None:
        """Commands for `ip`, one per line, as one batch."""
        run_tool(["ip", "-n", self.name, "-batch", "-"], "\n".join(lines))

    def run(self, words: Sequence[str], text: str = "") -> str:
        """A tool inside."""
        return run_tool([*self.prefix, *words], text)

    def set(self, **settings: int) -> None:
        """Kernel settings under net, with double underscores for slashes."""
        with self.entered():
            for name, value in settings.items():
                path = Path("/proc/sys/net", *name.split("__"))
                with suppress(FileNotFoundError):  # of a module that this kernel was built without
                    path.write_text(str(value))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets that this thread makes inside the block belong to the namespace, for ever."""
        libc = ctypes.CDLL(None, use_errno=True)
        with (
            Path("/proc/thread-self/ns/net").open() as home,
            (FOLDER / self.name).open() as target,
        ):
            _set_namespace(libc, target.fileno(), self.name)
            try:
                yield
            finally:
                _set_namespace(libc, home.fileno(), "where it came from")

    def end_processes(self) -> None:
        """Of all that runs inside; at once."""
        end_processes(self.name)

    def delete(self) -> None:
        delete_namespace(self.name)


def delete_namespace(name: str) -> None:
    """Ends what still runs inside, then removes it with its interfaces. Already gone is fine."""
    if not (FOLDER / name).exists():
        return
    end_processes(name)
    run_tool(["ip", "netns", "delete", name])


def end_processes(name: str) -> None:
    deadline = time.monotonic() + END_SECONDS
    while pids := run_tool(["ip", "netns", "pids", name]).split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline:
            raise LabError(f"processes {', '.join(pids)} in namespace {name} do not end")
        time.sleep(0.02)


def sweep() -> list[str]:
    """Removes the namespaces of labs whose process is gone; their names."""
    stale = [path.name for path in FOLDER.glob(f"{PREFIX}-*") if _is_stale(path.name)]
    for name in stale:
        with suppress(LabError):  # another lab sweeps at the same time
            delete_namespace(name)
    return stale


def own_namespaces() -> list[str]:
    """The names of those that this process has made and not deleted."""
    pid = os.getpid()
    return [path.name for path in FOLDER.glob(f"{PREFIX}-{pid}-{_start_time(pid)}-*")]


def _is_stale(name: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and _start_time(int(match[1])) != int(match[2])


def _start_time(pid: int) -> int | None:
    """Clock ticks since boot; None when there is no such process. See proc(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19])


def _set_namespace(libc: ctypes.CDLL, descriptor: int, name: str) -> None:
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise LabError(f"the thread cannot enter {name}: {os.strerror(number)}")
