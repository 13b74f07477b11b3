"""A worker process started ahead of its stage, so that importing torch delays nobody.

A newcomer that is granted a stage holds up the close of the step until it is ready; the seconds
that torch takes to import are spent before that, while the run's data is fetched.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from swarm_client.child import Child, start_child
from swarm_client.worker import protocol

WORKER_MODULE = "swarm_client.worker"

WorkerChild = Child[protocol.WorkerAnswer]


@asynccontextmanager
async def worker_process(threads: int, log_path: Path) -> AsyncIterator[WorkerChild]:
    """A process that waits for its Configure; dead when the block is left."""
    async with start_child(
        WORKER_MODULE, (), incoming=protocol.worker_answers, log_path=log_path,
        environment={"OMP_NUM_THREADS": str(threads)},
    ) as child:  # fmt: skip
        yield child


class SpareWorker:
    """Keeps one process for whoever comes first; later ones are started when needed."""

    def __init__(self, threads: int, log_path: Path) -> None:
        self._threads = threads
        self._log_path = log_path
        self._child: WorkerChild | None = None
        self._released = trio.Event()

    async def run(self) -> None:
        """Start the spare and own it until it has been used."""
        async with worker_process(self._threads, self._log_path) as child:
            self._child = child
            await self._released.wait()

    @asynccontextmanager
    async def process(self) -> AsyncIterator[WorkerChild]:
        """The spare, or a new process when it is used up."""
        spare, self._child = self._child, None
        if spare is None:
            async with worker_process(self._threads, self._log_path) as child:
                yield child
            return
        try:
            yield spare
        finally:
            self._released.set()
            with trio.CancelScope(shield=True):
                await spare.wait()
