"""The dashboard's process: its port, which the coordinator binds, and its status.

Imports nothing that the dashboard is made of. A port in use is reported once and tried again.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from dataclasses import replace

import trio

from swarm_coordinator.configuration.http_address import HttpAddress, address_of, listen
from swarm_coordinator.run_dir.folder import RunFolder, quoted
from swarm_coordinator.server.processes.supervisor import Report, Supervisor
from swarm_coordinator.status.document import DashboardStatus
from swarm_shared.base.errors import NetworkError, SwarmError
from swarm_shared.host.python_modules import module_command

log = logging.getLogger(__name__)

RETRY_SECONDS = 10.0
"""Seconds between attempts to bind a port in use."""


class DashboardProcess:
    """The process that serves the dashboard, and the address that it got."""

    def __init__(self, folder: RunFolder, wanted: HttpAddress, report: Report) -> None:
        self.folder = folder
        self.wanted = wanted
        self.report = report
        self.address: HttpAddress | None = None
        """Where the dashboard is served; None while no port is bound."""
        self.supervisor = Supervisor("the dashboard", folder.log, report)

    def status(self) -> DashboardStatus:
        return DashboardStatus(
            url=None if self.address is None else self.address.url,
            restarts=self.supervisor.restarts,
            failures=self.supervisor.failures,
        )

    async def run(self) -> None:
        """Serve the dashboard until cancelled. Raises nothing: the run continues without it."""
        await self.supervisor.guard(self._serve)

    async def _serve(self) -> None:
        bound = await self._bind()
        with contextlib.closing(bound):
            self.address = replace(address_of(bound), tls=self.wanted.tls)
            if self.wanted.port == 0:
                self._remember(self.address.port)
            self.report(
                f"dashboard at {self.address.url} (yours: `swarm-coordinator dashboard "
                f"{quoted(self.folder.path)}`)"
            )
            command = module_command("swarm_coordinator.dashboard", str(self.folder.path))
            await self.supervisor.keep_running(
                [*command, str(bound.fileno())], descriptors=[bound.fileno()]
            )

    # ------------------------------------------------------------ the port

    async def _bind(self) -> socket.socket:
        while True:
            try:
                return self._listen()
            except NetworkError as error:
                self.supervisor.failures += 1
                if not self.supervisor.reported:
                    self.supervisor.reported = True
                    self.report(
                        f"{error}; the run continues without the dashboard, which starts when the "
                        "port is free. Choose another one with --http HOST:PORT or with [http] "
                        "listen in run.toml"
                    )
            await trio.sleep(RETRY_SECONDS)

    def _listen(self) -> socket.socket:
        """Bind the address. Port 0 means the port of the last start, or any free one."""
        if self.wanted.port:
            return listen(self.wanted)
        with contextlib.suppress(SwarmError):
            last = self.folder.remembered_http_port()
            if last is not None:
                return listen(HttpAddress(self.wanted.host, last))
        return listen(self.wanted)

    def _remember(self, port: int) -> None:
        try:
            if self.folder.remembered_http_port() != port:
                self.folder.remember_http_port(port)
        except SwarmError as error:
            log.warning("the dashboard will have another port at the next start: %s", error)
