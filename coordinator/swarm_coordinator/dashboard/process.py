"""The dashboard's process: serves the coordinator's folder over HTTP until the coordinator ends.

Started by `server.processes.dashboard` with a listening socket, and with a pipe as standard input
that closes when the coordinator ends, however it ends. Reads the run folder and writes only its log
there, and at its first start the organiser's token.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio

from swarm_coordinator.configuration.http_address import tls_context
from swarm_coordinator.dashboard.app import build_app
from swarm_coordinator.dashboard.database_reader import DatabaseReader
from swarm_coordinator.dashboard.http_server import HttpServer
from swarm_coordinator.dashboard.middleware import GuardMiddleware
from swarm_coordinator.dashboard.prometheus import HttpStatistics, RunMetrics
from swarm_coordinator.dashboard.snapshot import Snapshot
from swarm_coordinator.dashboard.snapshot_loop import SnapshotLoop
from swarm_coordinator.durability.run_files import database_location, load_manifest, load_settings
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.text import LogFormatter
from swarm_shared.credit.credit import work_shares

log = logging.getLogger(__name__)

NICE = 5
"""Niceness of the process: on a busy machine training comes first."""
LOG_BYTES, LOG_FILES = 2 * 2**20, 2


class Dashboard:
    """The parts of the process, wired together."""

    def __init__(self, folder: RunFolder) -> None:
        manifest = load_manifest(folder)
        shares = work_shares([stage.work_flops for stage in manifest.stages])
        self.snapshot_loop = SnapshotLoop(
            folder, manifest, DatabaseReader(database_location(folder), shares)
        )
        self.app = build_app(self.snapshot_loop, folder.dashboard_token(), self._metrics)
        http = load_settings(folder).http
        hosts = frozenset(name.lower() for name in http.hosts)
        self.guard = GuardMiddleware(self.app, hosts=hosts)
        tls = tls_context(folder.path, http.certificate, http.key)
        self.server = HttpServer(self.guard, tls, http.proxies)

    def _metrics(self, snapshot: Snapshot) -> bytes:
        serving = HttpStatistics(
            requests=self.guard.answers,
            failures={
                "request": self.server.failures,
                "refused connection": self.server.refused_connections,
                "no request": self.server.bad_requests,
                "unreadable": self.snapshot_loop.failures,
                "slow reader": self.snapshot_loop.hub.dropped,
            },
            connections=self.server.connections,
            readers=len(self.snapshot_loop.hub),
            joined=self.snapshot_loop.joined,
            left=self.snapshot_loop.left,
        )
        return RunMetrics(snapshot, serving).exposition()

    async def serve(self, listener: socket.socket) -> None:
        """Read snapshots and answer requests until cancelled."""
        async with anyio.create_task_group() as tasks:
            first_read = anyio.Event()
            tasks.start_soon(self.snapshot_loop.run, first_read)
            await first_read.wait()  # so that the first request is not refused
            await self.server.serve(listener)


def main(arguments: Sequence[str]) -> int:
    """Run the process. `arguments` are RUN_DIR and the listening socket's descriptor."""
    folder = RunFolder(Path(arguments[0]))
    _log_to(folder.log / "http.log")
    with contextlib.suppress(OSError):
        os.nice(NICE)
    try:
        anyio.run(_serve, folder, int(arguments[1]))
    except SwarmError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


async def _serve(folder: RunFolder, descriptor: int) -> None:
    listener = socket.socket(fileno=descriptor)
    listener.setblocking(False)
    dashboard = Dashboard(folder)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(dashboard.serve, listener)
        await anyio.wait_readable(0)  # the end of the pipe: the coordinator writes nothing
        tasks.cancel_scope.cancel()


def _log_to(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=LOG_BYTES, backupCount=LOG_FILES, encoding="utf-8"
        )
        handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)
        logging.getLogger().setLevel(logging.INFO)
    logging.raiseExceptions = False
