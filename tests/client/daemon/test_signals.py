"""Ctrl-C and SIGTERM at the daemon."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import trio
import trio.testing

from swarm_client.daemon.daemon import Daemon
from swarm_client.machine.home import Home


async def test_a_daemon_that_leaves_at_once_says_so_once_however_many_signals_come(
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    daemon = Daemon(Home.create(tmp_path / "home"), lines.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(daemon._take_signals)
        await trio.testing.wait_all_tasks_blocked()
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert lines == ["leaving at once"]
