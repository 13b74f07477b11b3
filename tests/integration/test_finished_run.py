"""A volunteer that comes too late: a real client joins a run that has finished."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from kits.coordinator.shell_world import crew_of, make_run, served, train_to_the_end
from swarm_client.control.client import is_running
from swarm_client.machine.home import Home
from swarm_coordinator.demo.local_swarm import LocalSwarm
from swarm_coordinator.demo.subprocesses import (
    CLIENT_MODULE,
    Subprocesses,
    wait_until,
)
from swarm_shared.host.python_modules import module_command

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

PATIENCE_SECONDS = 120.0
SENTENCE = "the run has finished after 4 steps; nothing is left to compute"


async def train(path: Path) -> None:
    """Train a run to its end, with scripted volunteers."""
    folder = make_run(path)
    async with served(folder) as run:
        await train_to_the_end(crew_of(run.invite, run.manifest, path))
        await run.ended.wait()


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[LocalSwarm]:
    trio.run(train, tmp_path / "a run")
    with Subprocesses() as children:
        yield LocalSwarm(tmp_path / "a run", children)


def join(invite: str, home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = ("join", invite, "--home", str(home), "--device", "cpu", "--threads", "1", *options)
    return subprocess.run(
        module_command(CLIENT_MODULE, *words), capture_output=True, text=True,
        timeout=PATIENCE_SECONDS, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_a_volunteer_that_joins_a_finished_run_is_told_so_and_ends(
    swarm: LocalSwarm, tmp_path: Path
) -> None:
    invite = swarm.start_coordinator()
    late = join(invite, tmp_path / "home")
    assert (late.returncode, late.stderr) == (0, "")
    # The lines before it name this peer, its device and how averages are carried.
    assert late.stdout.splitlines()[-1].endswith(SENTENCE)
    assert "admitted" not in late.stdout
    assert "trying again" not in late.stdout

    home = Home.locate(tmp_path / "another home")
    detached = join(invite, home.path, "--detach")
    assert (detached.returncode, detached.stderr) == (0, "")
    assert detached.stdout.splitlines()[-1].endswith(SENTENCE)
    wait_until(
        lambda: not is_running(home.socket_path), swarm.children, PATIENCE_SECONDS,
        "the daemon, which has nothing left to do, to end",
    )  # fmt: skip

    coordinator = swarm.coordinator
    assert coordinator is not None
    assert coordinator.exit_code() is None, "it stays for the next one"
    coordinator.signal(signal.SIGINT)
    assert coordinator.wait(PATIENCE_SECONDS) == 0
