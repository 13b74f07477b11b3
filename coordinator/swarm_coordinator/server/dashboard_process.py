"""Supervises the dashboard's process from the coordinator, which it never ends.

Imports nothing that the dashboard is made of. A failure of the process is logged, counted and
answered by a restart, after longer pauses when it keeps failing. A port in use is reported once and
tried again.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import trio

from swarm_coordinator.configuration.http_address import HttpAddress, address_of, listen
from swarm_coordinator.run_dir.folder import RunFolder, quoted
from swarm_coordinator.status.document import DashboardStatus
from swarm_shared.base.backoff import Backoff
from swarm_shared.base.errors import NetworkError, SwarmError

log = logging.getLogger(__name__)

RETRY_SECONDS = 10.0
"""Seconds between attempts to bind a port in use."""
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 60.0
"""Seconds before a restart: the first pause, and the limit of its doubling."""
STEADY_SECONDS = 60.0
"""Seconds of running after which the pauses begin anew."""
ERROR_BYTES = 4096
"""Bytes of the end of its standard error kept for the coordinator's log."""

Report = Callable[[str], None]


@dataclass(slots=True)
class DashboardProcess:
    folder: RunFolder
    wanted: HttpAddress
    report: Report
    """Prints one line for the organiser."""
    address: HttpAddress | None = None
    """Where the dashboard is served; None while no port is bound."""
    restarts: int = 0
    pid: int | None = None
    failures: int = 0
    _reported: bool = field(default=False, init=False)

    def status(self) -> DashboardStatus:
        return DashboardStatus(
            url=None if self.address is None else self.address.url,
            restarts=self.restarts,
            failures=self.failures,
        )

    async def run(self) -> None:
        """Serve the dashboard until cancelled. Raises nothing: the run continues without it."""
        try:
            await self._serve()
        except Exception:  # a supervisor: the dashboard must not end the run
            self.failures += 1
            log.exception("the dashboard is given up")
            self.report(f"the dashboard is given up; details are in {self.folder.log}")

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
            await self._keep_running(bound)

    # ------------------------------------------------------------ the port

    async def _bind(self) -> socket.socket:
        while True:
            try:
                return self._listen()
            except NetworkError as error:
                self.failures += 1
                if not self._reported:
                    self._reported = True
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

    # ------------------------------------------------------------ the process

    async def _keep_running(self, bound: socket.socket) -> None:
        pause = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        while True:
            began = trio.current_time()
            try:
                self.folder.dashboard_token()
                last_output = await self._run_once(bound)
            except (OSError, SwarmError) as error:
                last_output = str(error)
            self.restarts += 1
            self.failures += 1
            log.error("the dashboard's process ended: %s", last_output or "no output")
            if trio.current_time() - began > STEADY_SECONDS:
                pause.reset()
            if not self._reported and pause.seconds > FIRST_PAUSE_SECONDS:
                self._reported = True
                self.report(
                    "the dashboard keeps failing: "
                    f"{last_output.splitlines()[-1] if last_output else ''}; "
                    f"the run continues, details are in {self.folder.log}"
                )
            await trio.sleep(pause.next())

    async def _run_once(self, bound: socket.socket) -> str:
        """Run the process to its end and return the end of its output. Cancellation kills it."""
        descriptor = bound.fileno()
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "swarm_coordinator.dashboard", str(self.folder.path),
             str(descriptor)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            pass_fds=(descriptor,),
            # Ctrl-C in a terminal is for the coordinator.
            start_new_session=True,
        )  # fmt: skip
        self.pid = process.pid
        assert process.stderr is not None
        try:
            last_output = bytearray()
            async for part in process.stderr:
                last_output += part
                del last_output[:-ERROR_BYTES]
            await process.wait()
            return (
                f"exit code {process.returncode}\n" + last_output.decode(errors="replace").strip()
            )
        finally:
            self.pid = None
            with trio.CancelScope(shield=True):
                process.kill()
                await process.wait()
                for pipe in (process.stdin, process.stderr):
                    if pipe is not None:
                        await pipe.aclose()
