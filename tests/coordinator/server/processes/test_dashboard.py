"""The dashboard beside a real coordinator: starts, is restarted, and never harms it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from http.client import HTTPConnection

import psutil
import pytest
import trio
import trio.to_thread

from kits.coordinator.shell_world import served
from kits.waiting import until
from swarm_coordinator.configuration.http_address import (
    HttpAddress,
    address_of,
    listen,
    parse_address,
)
from swarm_coordinator.dashboard.process import Dashboard
from swarm_coordinator.run_dir.folder import RunFolder, quoted
from swarm_coordinator.server.processes.dashboard import DashboardProcess
from swarm_coordinator.status.document import DashboardStatus
from swarm_shared.base.errors import ConfigurationError, NetworkError

ANY = HttpAddress("127.0.0.1", 0)


@asynccontextmanager
async def dashboard_process(
    folder: RunFolder, wanted: HttpAddress = ANY
) -> AsyncIterator[tuple[DashboardProcess, list[str]]]:
    lines: list[str] = []
    made = DashboardProcess(folder, wanted, lines.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        yield made, lines
        nursery.cancel_scope.cancel()


async def get(address: HttpAddress | None, path: str) -> tuple[int, bytes]:
    assert address is not None

    def send_request() -> tuple[int, bytes]:
        connection = HTTPConnection(address.host, address.port, timeout=50)
        with closing(connection):
            connection.request("GET", path)
            found = connection.getresponse()
            return found.status, found.read()

    return await trio.to_thread.run_sync(send_request)


async def test_a_request_before_the_process_is_ready_is_answered_when_it_is(
    folder: RunFolder,
) -> None:
    async with dashboard_process(folder) as (made, lines):
        await until(lambda: made.address is not None)
        status, body = await get(made.address, "/api/v1/run")
        assert status == 503, "no coordinator has said anything in this folder"
        assert b"error" in body
        assert lines == [
            f"dashboard at {made.address.url if made.address else ''} (yours: `swarm-coordinator "
            f"dashboard {quoted(folder.path)}`)"
        ]
        process = made.supervisor.pid
    assert process is not None
    assert not psutil.pid_exists(process)


async def test_a_process_that_is_killed_is_started_again_at_the_same_port(
    folder: RunFolder,
) -> None:
    async with dashboard_process(folder) as (made, _):
        await until(lambda: made.supervisor.pid is not None)
        first, address = made.supervisor.pid, made.address
        await get(address, "/")
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: made.supervisor.pid not in (None, first))
        assert (await get(address, "/"))[0] == 200
        assert made.status() == DashboardStatus(url=address.url, restarts=1, failures=1)


async def test_the_port_is_the_same_at_the_next_start(folder: RunFolder) -> None:
    async with dashboard_process(folder) as (made, _):
        await until(lambda: made.address is not None)
        first = made.address
    async with dashboard_process(folder) as (made, _):
        await until(lambda: made.address is not None)
        assert made.address == first


async def test_a_port_that_was_picked_and_is_taken_now_gives_way_to_another(
    folder: RunFolder,
) -> None:
    with closing(listen(ANY)) as other:
        taken = address_of(other)
        folder.remember_http_port(taken.port)
        async with dashboard_process(folder) as (made, _):
            await until(lambda: made.address is not None)
            assert made.address != taken


async def test_a_chosen_port_in_use_is_reported_and_the_run_continues(
    folder: RunFolder,
) -> None:
    with closing(listen(ANY)) as other:
        taken = address_of(other)
        async with dashboard_process(folder, taken) as (made, lines):
            await until(lambda: lines)
            assert str(taken) in lines[0]
            assert "--http" in lines[0]
            assert made.address is None
            assert made.status().failures == 1


async def test_the_process_ends_with_a_coordinator_that_is_killed(folder: RunFolder) -> None:
    program = (
        "import sys, trio; from pathlib import Path\n"
        "from swarm_coordinator.server.processes.dashboard import DashboardProcess\n"
        "from swarm_coordinator.configuration.http_address import HttpAddress\n"
        "from swarm_coordinator.run_dir.folder import RunFolder, quoted\n"
        "folder = RunFolder(Path(sys.argv[1]))\n"
        "made = DashboardProcess(folder, HttpAddress('127.0.0.1', 0), print)\n"
        "trio.run(made.run)\n"
    )
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", program, str(folder.path)], stdout=subprocess.DEVNULL
    )
    children: list[psutil.Process] = []
    while not children:
        children = psutil.Process(process.pid).children()
        await trio.sleep(0.05)
    process.kill()
    await process.wait()
    await until(lambda: not children[0].is_running() or children[0].status() == "zombie")


async def test_the_dashboard_shows_what_a_real_coordinator_wrote(
    folder: RunFolder,
) -> None:
    """From the folder of a run that trains to its end, with nothing made up in between."""
    pages: list[Dashboard] = []

    async def watch(scope: trio.CancelScope) -> None:
        with scope:
            while True:
                if folder.status.exists():
                    pages[:] = pages or [Dashboard(folder)]
                    await pages[0].snapshot_loop.refresh()
                    snapshot = pages[0].snapshot_loop.snapshot
                    assert snapshot is not None
                    for document in (
                        snapshot.run, snapshot.stages, snapshot.peers, snapshot.full_peers,
                        snapshot.admission, snapshot.tokens, snapshot.events,
                    ):  # fmt: skip
                        assert document is not None
                    pages[0]._metrics(snapshot)
                await trio.sleep(0.05)

    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()
        nursery.start_soon(watch, scope)
        async with served(folder) as run:
            await run.train()
        scope.cancel()
    await pages[0].snapshot_loop.refresh()
    snapshot = pages[0].snapshot_loop.snapshot
    assert snapshot is not None
    assert snapshot.health.state == "finished"
    assert (snapshot.run.version, snapshot.database.step_count) == (4, 4)
    assert snapshot.run.tokens == 4 * run.manifest.tokens_per_step
    assert {one.name for one in snapshot.database.contributions} == {"volunteer-0", "volunteer-1"}
    total = sum(one.credit for one in snapshot.database.contributions)
    assert total == pytest.approx(snapshot.run.tokens)
    assert b"swarm_applied_steps 4.0" in pages[0]._metrics(snapshot)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8080", HttpAddress("127.0.0.1", 8080)),
        ("[::1]:0", HttpAddress("::1", 0)),
        (" localhost:1 ", HttpAddress("localhost", 1)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, address: HttpAddress) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "8080", "127.0.0.1", "::1:80", "a:b", "h:65536", "http://h:1", "h:-1", "[x]:1"]
)
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"HOST:PORT"):
        parse_address(text)


def test_an_address_that_is_not_this_machines_cannot_be_listened_at() -> None:
    with pytest.raises(NetworkError, match=r"192\.0\.2\.123"):
        listen(HttpAddress("192.0.2.123", 1))
