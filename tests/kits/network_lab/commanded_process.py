"""A program on a machine of the lab that is told what to do: a line of JSON in, a line out."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from kits.network_lab.commands import LabError
from kits.network_lab.machines import Host
from swarm_coordinator.demo.subprocesses import Subprocess, last_lines

ANSWER_SECONDS = 60.0
READ_BYTES = 65_536

Do = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


class ToldProcess:
    """The caller's end. Several may be sent requests before their answers are taken.

    A program says something once by itself when it is ready: `greeting`.
    """

    def __init__(
        self, host: Host, module: str, arguments: Sequence[str], log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.host = host
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        # The folders that this process imports from, wherever it was started.
        paths = os.pathsep.join(path for path in sys.path if path)
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                [*host.prefix, sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
                env={**os.environ, **(environment or {}), "PYTHONPATH": paths},
                start_new_session=True,
            )  # fmt: skip
        host.adopt(Subprocess(host.name, log, self._popen))
        self._buffer = bytearray()
        self._greeting: dict[str, Any] | None = None

    @property
    def greeting(self) -> dict[str, Any]:
        """Waits for it."""
        if self._greeting is None:
            self._greeting = self._take()
        return self._greeting

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """A request and its answer; LabError when the program says that it went wrong."""
        self.send(do, **arguments)
        return self.take()

    def send(self, do: str, **arguments: Any) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._popen.stdin.flush()

    def take(self) -> dict[str, Any]:
        _ = self.greeting
        return self._take()

    def _take(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._line(time.monotonic() + ANSWER_SECONDS))
        if (error := answer.get("error")) is not None:
            raise LabError(f"{self.host.name}: {error}")
        return answer

    def cpu_seconds(self) -> float:
        """Of the program and of those that it started."""
        program = psutil.Process(self._popen.pid)
        times = [one.cpu_times() for one in (program, *program.children(recursive=True))]
        return float(sum(used.user + used.system for used in times))

    def end(self) -> None:
        """Like a crash."""
        self._popen.kill()
        self._popen.wait()

    def _line(self, deadline: float) -> bytes:
        assert self._popen.stdout is not None
        pipe = self._popen.stdout.fileno()
        while (end := self._buffer.find(b"\n")) < 0:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(pipe, READ_BYTES) if ready else b""
            if not chunk:
                why = "did not answer in time" if not ready else "ended"
                words = "\n".join(last_lines(self.log, 20))
                raise LabError(f"the program on {self.host.name} {why}:\n{words}")
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line


async def obey(
    requests: AsyncIterable[bytes], do: Do, expected: tuple[type[Exception], ...]
) -> None:
    """The program's end: carries requests out until there are no more."""
    buffer = bytearray()
    async for chunk in requests:
        buffer += chunk
        while (end := buffer.find(b"\n")) >= 0:
            request = json.loads(bytes(buffer[:end]))
            del buffer[: end + 1]
            try:
                answer = await do(request.pop("do"), request)
            except expected as error:
                answer = {"error": str(error)}
            say(answer)


def say(answer: Mapping[str, Any]) -> None:
    print(json.dumps(answer), flush=True)
