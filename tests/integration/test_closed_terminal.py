"""The terminals of a volunteer and of a coordinator are closed while they work."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from swarm_coordinator.demo.subprocesses import CLIENT_MODULE, COORDINATOR_MODULE
from swarm_shared.host.python_modules import module_command

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


@dataclass(slots=True)
class Terminal:
    """A terminal with one program in it."""

    process: subprocess.Popen[bytes]
    descriptor: int
    shown: str = ""

    def wait_for(self, pattern: str, seconds: float = 90.0) -> str:
        """Return what the first group of the pattern is on the screen."""
        until = time.monotonic() + seconds
        while (found := re.search(pattern, self.shown)) is None:
            left = max(0.0, until - time.monotonic())
            ready, _, _ = select.select([self.descriptor], [], [], left)
            assert ready, f"no {pattern!r} in:\n{self.shown}"
            self.shown += os.read(self.descriptor, 65536).decode(errors="replace")
        return found[found.re.groups]

    def close(self) -> None:
        os.close(self.descriptor)
        self.descriptor = -1


@contextmanager
def terminal(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Terminal]:
    outer, inner = os.openpty()

    def make_controlling() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under `nohup`
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        command, stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
        preexec_fn=make_controlling, env=environment,
    )  # fmt: skip
    os.close(inner)
    opened = Terminal(process, outer)
    try:
        yield opened
    finally:
        if opened.descriptor >= 0:
            opened.close()
        process.kill()
        process.wait()


def unexpected(folder: Path) -> list[Path]:
    return list(folder.rglob("*-error.log"))


def test_a_closed_terminal_stops_both_in_order_and_loses_nothing(
    make_run: Callable[..., Any], tmp_path: Path
) -> None:
    run = make_run(1, steps=400, limits__starting_peers_per_stage=1)
    environment = os.environ | run.swarm.environment
    start = module_command(COORDINATOR_MODULE, "start", str(run.folder.path))
    with terminal(start, environment) as coordinator:
        invite = coordinator.wait_for(r"(swarm1\S{60,})\s")
        join = module_command(
            CLIENT_MODULE, "join", invite, "--home", str(tmp_path / "home"), "--threads", "1",
            "--device", "cpu",
        )  # fmt: skip
        with terminal(join, environment) as volunteer:
            volunteer.wait_for("step 2 applied")
            volunteer.close()
            assert volunteer.process.wait(60.0) == 0
        coordinator.wait_for("is gone: left after its work was counted")
        coordinator.close()
        assert coordinator.process.wait(60.0) == 0
    stored = [int(n) for n in re.findall(r"checkpoint of step (\d+) is stored", coordinator.shown)]
    assert stored[-1] == run.version() >= 2
    assert unexpected(run.folder.path) == unexpected(tmp_path) == []
