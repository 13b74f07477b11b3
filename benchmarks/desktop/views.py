"""Cost of the terminal views: `make bench-views`.

A real run on this machine whose two volunteers are throttled to the rate of small devices, so that
the CPU is mostly idle. Both views, a volunteer's and the coordinator's, are opened in a
pseudo-terminal of 80 by 24:

    start     from starting the program to the first frame on the terminal, and to the first frame
              with data from the daemon or the run's folder; CPU seconds until then
    share     of a core, over half a minute of an open view; its memory at the end

Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.outcome import conclude, out_option, result_head, work_folder
from benchmarks.pages.tables import views_markdown
from benchmarks.throughput.faults import SETTINGS, throttled
from swarm_coordinator.demo.local_swarm import LocalSwarm
from swarm_coordinator.demo.subprocesses import (
    CLIENT_MODULE,
    COORDINATOR_MODULE,
    Subprocesses,
    wait_until,
)
from swarm_coordinator.run_creation.initialise import initialise_run
from swarm_shared.base.errors import SwarmError
from swarm_shared.host.python_modules import module_command

PACKAGES = ("textual", "rich", "pydantic", "swarmtrain")
COLUMNS, ROWS = 80, 24
FRAME = b"Overview"
"""A title in the row of tabs, which is drawn in the first frame."""
WHOLE = b"tokens/s"
"""A label in both overviews that is drawn with the first data."""
START_SECONDS = 60.0
SETTLE_SECONDS = 5.0
SHARE_SECONDS = 30.0
READY_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Start:
    frame_seconds: float
    whole_seconds: float
    cpu_seconds: float


class Terminal:
    """A program in a pseudo-terminal whose output is read; it gets no input."""

    def __init__(self, command: Sequence[str]) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.seen = b""

    def read(self, seconds: float) -> None:
        """Read the output of `seconds`; raises SwarmError when the program has ended."""
        ready, _, _ = select.select([self._ours], [], [], seconds)
        if ready:
            try:
                self.seen += os.read(self._ours, 65536)
            except OSError as error:
                raise SwarmError(f"the view has ended: {self.seen[-500:]!r}") from error

    def wait_for(self, words: bytes) -> float:
        """Return the seconds from the start until `words` was written."""
        while words not in self.seen:
            if time.monotonic() > self.started_at + START_SECONDS:
                raise SwarmError(f"{words!r} is not on the screen: {self.seen[-500:]!r}")
            self.read(0.5)
        return time.monotonic() - self.started_at

    def drain(self, seconds: float) -> None:
        """Read and discard the output for `seconds`, as a terminal does."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.read(left)
            self.seen = b""

    def cpu_seconds(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@contextmanager
def opened(command: Sequence[str]) -> Iterator[Terminal]:
    terminal = Terminal(command)
    try:
        yield terminal
    finally:
        terminal.close()


def one_start(command: Sequence[str]) -> Start:
    with opened(command) as terminal:
        frame, whole = terminal.wait_for(FRAME), terminal.wait_for(WHOLE)
        return Start(frame, whole, terminal.cpu_seconds())


def share(command: Sequence[str]) -> dict[str, float]:
    with opened(command) as terminal:
        terminal.wait_for(WHOLE)
        terminal.drain(SETTLE_SECONDS)
        before = terminal.cpu_seconds()
        terminal.drain(SHARE_SECONDS)
        used = terminal.cpu_seconds() - before
        memory = psutil.Process(terminal.process.pid).memory_info().rss
    return {"cpu_share": used / SHARE_SECONDS, "memory_bytes": float(memory)}


@contextmanager
def running(work: Path) -> Iterator[LocalSwarm]:
    """Yield the run after its first steps."""
    run_dir = work / "run"
    overrides = {**SETTINGS, "run.name": "views", "limits.starting_peers_per_stage": 1}
    initialise_run(run_dir, "tiny", stages=2, overrides=overrides)
    with Subprocesses() as children:
        swarm = LocalSwarm(run_dir, children, environment=throttled(work / "plan.json"))
        invite = swarm.start_coordinator()
        for stage in (0, 1):
            swarm.start_volunteer(invite, stage)
        wait_until(
            lambda: swarm.status().get("version", 0) >= 2, children, READY_SECONDS, "two steps"
        )
        yield swarm
        swarm.stop()


def measure(work: Path, starts: int) -> dict[str, Any]:
    with running(work) as swarm:
        home = str(swarm.home(swarm.volunteers[0].name))
        views = {
            "swarm-client top": module_command(CLIENT_MODULE, "top", "--home", home),
            "swarm-coordinator top": module_command(COORDINATOR_MODULE, "top", str(swarm.run_dir)),
        }
        found: dict[str, list[Start]] = {name: [] for name in views}
        for _ in range(starts):
            for name, command in views.items():
                found[name].append(one_start(command))
                click.echo(f"{name}: first frame after {found[name][-1].frame_seconds:.2f} s")
        shares = {name: share(command) for name, command in views.items()}
    return {
        **result_head(PACKAGES),
        "columns": COLUMNS,
        "rows": ROWS,
        "share_seconds": SHARE_SECONDS,
        "views": {
            name: {"starts": [asdict(one) for one in found[name]], **shares[name]} for name in views
        },
    }


@click.command()
@click.option("--starts", default=10, show_default=True, type=click.IntRange(1, 1000))
@out_option("views.json")
def main(starts: int, out: Path) -> None:
    """Measure the start-up time of both views and their cost while they are open."""
    with work_folder("views") as work:
        document = measure(work, starts)
    conclude(out, document, views_markdown)


if __name__ == "__main__":
    main()
