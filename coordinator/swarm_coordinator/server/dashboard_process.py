"""In the coordinator: keeps the process of the pages running, and never lets it end the run.

Imports nothing of what that process is made of. Whatever happens to it is logged, counted and put
right by starting it again, after longer and longer pauses when it keeps failing. A port that is
taken is said once and asked for again.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from swarm_coordinator.configuration.http_address import HttpAddress, address_of, listen
from swarm_coordinator.run_dir.folder import RunFolder, quoted
from swarm_coordinator.status.document import DashboardStatus
from swarm_shared.base.errors import NetworkError, SwarmError

log = logging.getLogger(__name__)

RETRY_SECONDS = 10.0
"""Between two looks whether a taken port is free."""
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 60.0
STEADY_SECONDS = 60.0
"""A process that ran for so long had been fine: pauses begin anew."""
ERROR_BYTES = 4096
"""Of what it wrote last to its standard error, for the coordinator's log."""

Report = Callable[[str], None]


@dataclass(slots=True)
class DashboardProcess:
    folder: RunFolder
    wanted: HttpAddress
    report: Report
    """Takes one line for the organiser's eyes."""
    address: HttpAddress | None = None
    """Where the pages are; None while there is no port."""
    restarts: int = 0
    pid: int | None = None
    failures: int = 0
    _reported: bool = field(default=False, init=False)

    def status(self) -> DashboardStatus:
        return DashboardStatus(
            address=None if self.address is None else str(self.address),
            restarts=self.restarts,
            failures=self.failures,
        )

    async def run(self) -> None:
        """Until cancelled. Raises nothing: without pages the run goes on."""
        try:
            await self._serve()
        except Exception:  # a supervisor: pages are no reason to end a run
            self.failures += 1
            log.exception("the pages are given up")
            self.report(f"the dashboard is given up; details are in {self.folder.log}")

    async def _serve(self) -> None:
        bound = await self._bind()
        with contextlib.closing(bound):
            self.address = address_of(bound)
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
                        f"{error}; the run goes on without them, and they come when that port is "
                        "free. Another one is --http HOST:PORT, or [http] listen in run.toml"
                    )
            await trio.sleep(RETRY_SECONDS)

    def _listen(self) -> socket.socket:
        """Port 0 is the one of the last start, or any other that is free."""
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
            log.warning("the pages' port is another one at the next start: %s", error)

    # ------------------------------------------------------------ the process

    async def _keep_running(self, bound: socket.socket) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            began = trio.current_time()
            try:
                self.folder.dashboard_token()
                last_output = await self._run_once(bound)
            except (OSError, SwarmError) as error:
                last_output = str(error)
            self.restarts += 1
            self.failures += 1
            log.error("the process of the pages ended: %s", last_output or "it said nothing")
            if trio.current_time() - began > STEADY_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            if not self._reported and pause > FIRST_PAUSE_SECONDS:
                self._reported = True
                self.report(
                    "the dashboard cannot be kept up: "
                    f"{last_output.splitlines()[-1] if last_output else ''}; "
                    f"the run goes on, details are in {self.folder.log}"
                )
            await trio.sleep(pause)
            pause = min(LONGEST_PAUSE_SECONDS, 2 * pause)

    async def _run_once(self, bound: socket.socket) -> str:
        """Until it ends; its last words. Ended and waited for when this is cancelled."""
        descriptor = bound.fileno()
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "swarm_coordinator.dashboard", str(self.folder.path),
             str(descriptor)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            pass_fds=(descriptor,),
            # Ctrl-C in a terminal is the coordinator's to deal with.
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
