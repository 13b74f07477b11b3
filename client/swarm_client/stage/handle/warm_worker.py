"""A worker process started ahead of its stage, so that importing torch delays nobody.

A newcomer that is granted a stage holds up the close of the step until it is ready. The seconds
that torch takes to import are spent before it asks for one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from swarm_client.ipc.child_process import ChildProcess, start_child
from swarm_client.stage.protocol import messages

WORKER_MODULE = "swarm_client.stage.worker"

WorkerChild = ChildProcess[messages.WorkerAnswer]


@asynccontextmanager
async def worker_process(threads: int, log_path: Path) -> AsyncIterator[WorkerChild]:
    """A process that has imported what it needs and waits for its ConfigureStage; dead when the
    block
    is left. One that has died at once is handed out, too: whoever asks it for something is told."""
    async with start_child(
        WORKER_MODULE, (), incoming=messages.worker_answers, log_path=log_path,
        environment={"OMP_NUM_THREADS": str(threads)},
    ) as child:  # fmt: skip
        await child.link.receive()  # Awake
        yield child


class WarmWorker:
    """Keeps one process for whoever comes first. Run `run` beside it."""

    def __init__(self, threads: int, log_path: Path) -> None:
        self._threads = threads
        self._log_path = log_path
        self._child: WorkerChild | None = None
        self._awake = trio.Event()
        self._wanted = trio.Event()
        self._wanted.set()
        self._released = trio.Event()

    async def run(self) -> None:
        """Start a spare whenever one is wanted, at first at once; own each until it was used."""
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            async with worker_process(self._threads, self._log_path) as child:
                self._child = child
                self._awake.set()
                await self._released.wait()
            self._released = trio.Event()

    async def ready(self) -> None:
        """Wait until there is a spare, which whoever asks for a process next gets."""
        self._wanted.set()
        await self._awake.wait()

    @asynccontextmanager
    async def process(self) -> AsyncIterator[WorkerChild]:
        """The spare, or a new process when there is none."""
        spare, self._child = self._child, None
        self._awake = trio.Event()
        if spare is None:
            async with worker_process(self._threads, self._log_path) as child:
                yield child
            return
        self._wanted = trio.Event()
        try:
            yield spare
        finally:
            self._released.set()
            with trio.CancelScope(shield=True):
                await spare.wait()
