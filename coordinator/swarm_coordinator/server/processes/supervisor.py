"""Keeps a process of the coordinator running, for as long as the coordinator runs.

A failure of the process is logged, counted and answered by a restart, after longer pauses when it
keeps failing. The process gets a pipe as its standard input that closes when the coordinator ends,
however it ends.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trio

from swarm_shared.base.backoff import Backoff
from swarm_shared.base.error_groups import single_error_unwrapped
from swarm_shared.base.errors import ProtocolError, SwarmError

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 60.0
"""Seconds before a restart: the first pause, and the limit of its doubling."""
STEADY_SECONDS = 60.0
"""Seconds of running after which the pauses begin anew."""
ERROR_BYTES = 4096
"""Bytes of the end of its standard error kept for the coordinator's log."""

Report = Callable[[str], None]
"""Prints one line for the organiser."""
TakeLine = Callable[[bytes], None]


@dataclass(slots=True)
class Supervisor:
    """Keeps one process running, and reports once that it keeps failing."""

    name: str
    """The name of the process with its article, as in a sentence."""
    log_folder: Path
    """Where the organiser finds details."""
    report: Report
    restarts: int = 0
    failures: int = 0
    pid: int | None = None
    reported: bool = field(default=False, init=False)
    """Whether a failure was reported to the organiser; once is enough."""

    async def guard(self, work: Callable[[], Awaitable[None]]) -> None:
        """Carry out `work`. Raises nothing: the run continues without the process."""
        try:
            await work()
        except Exception:  # a supervisor: no process beside the coordinator ends the run
            self.failures += 1
            log.exception("%s is given up", self.name)
            self.report(f"{self.name} is given up; details are in {self.log_folder}")

    async def keep_running(
        self,
        command: Sequence[str],
        descriptors: Sequence[int] = (),
        take_line: TakeLine | None = None,
        longest_line: int = 0,
    ) -> None:
        """Run the command, again whenever it ends, until cancelled. `take_line` gets each line that
        it prints, of at most `longest_line` bytes; without it, what it prints is dropped."""
        pause = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        while True:
            began = trio.current_time()
            try:
                last_output = await self._run_once(command, descriptors, take_line, longest_line)
            except (OSError, SwarmError) as error:
                last_output = str(error)
            self.restarts += 1
            self.failures += 1
            log.error("%s's process ended: %s", self.name, last_output or "no output")
            if trio.current_time() - began > STEADY_SECONDS:
                pause.reset()
            if not self.reported and pause.seconds > FIRST_PAUSE_SECONDS:
                self.reported = True
                self.report(
                    f"{self.name} keeps failing: "
                    f"{last_output.splitlines()[-1] if last_output else ''}; "
                    f"the run continues, details are in {self.log_folder}"
                )
            await trio.sleep(pause.next())

    async def _run_once(
        self,
        command: Sequence[str],
        descriptors: Sequence[int],
        take_line: TakeLine | None,
        longest_line: int,
    ) -> str:
        """Run the process to its end and return the end of its output. Cancellation kills it."""
        process = await trio.lowlevel.open_process(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL if take_line is None else subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=tuple(descriptors),
            # Ctrl-C in a terminal is for the coordinator.
            start_new_session=True,
        )
        self.pid = process.pid
        assert process.stderr is not None
        last_output = bytearray()
        try:
            with single_error_unwrapped():
                async with trio.open_nursery() as nursery:
                    if process.stdout is not None and take_line is not None:
                        nursery.start_soon(_take_lines, process.stdout, take_line, longest_line)
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
                for pipe in (process.stdin, process.stdout, process.stderr):
                    if pipe is not None:
                        await pipe.aclose()


async def _take_lines(
    output: trio.abc.ReceiveStream, take_line: TakeLine, longest_line: int
) -> None:
    rest = b""
    async for part in output:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            take_line(line)
        if len(rest) > longest_line:
            raise ProtocolError(f"a line of more than {longest_line} bytes was printed")
