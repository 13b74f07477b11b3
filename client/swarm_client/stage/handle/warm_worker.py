"""A worker process started before its stage is known, so that importing torch delays no step.

A joining peer that has been assigned a stage delays the step close until it is ready. The seconds
of torch's import are spent before it asks for a stage.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from swarm_client.ipc.child_process import ChildProcess, start_child
from swarm_client.stage.protocol import messages

WORKER_MODULE = "swarm_client.stage.worker"

TUNABLES = "GLIBC_TUNABLES"
"""The environment variable with settings of the C library, where that is glibc."""

KEEP_FREED_MEMORY = (
    f"glibc.malloc.mmap_threshold={32 * 2**20}:glibc.malloc.trim_threshold={2**64 - 1}"
)
"""Settings under which a worker keeps what it has freed, until memory is short.

A step ends with hundreds of megabytes free: graphs, and what was kept for the gradients of weights.
By default glibc gives them back to the system, which clears each page again in the next step. The
threshold of mmap is the largest that glibc takes: it no longer grows by itself once a threshold is
set. Huge pages (`glibc.malloc.hugetlb=1`) made no product faster, and the first step slower."""

WorkerChild = ChildProcess[messages.WorkerAnswer]


@asynccontextmanager
async def worker_process(threads: int, log_path: Path) -> AsyncIterator[WorkerChild]:
    """Start a process that has imported what it needs and waits for its ConfigureStage; it is dead
    when the block is left. A process that died at once is returned too: the first request to it
    reports the death."""
    async with start_child(
        WORKER_MODULE, incoming=messages.worker_answers, log_path=log_path,
        environment={"OMP_NUM_THREADS": str(threads), TUNABLES: _tunables()},
    ) as child:  # fmt: skip
        await child.link.receive()  # Awake
        yield child


def _tunables() -> str:
    """The worker's settings, then the user's own, which count where both have one."""
    return ":".join(filter(None, (KEEP_FREED_MEMORY, os.environ.get(TUNABLES))))


class WarmWorker:
    """Keeps one process ready for the next caller. Run `run` beside it."""

    def __init__(self, threads: int, log_path: Path) -> None:
        self._threads = threads
        self._log_path = log_path
        self._child: WorkerChild | None = None
        self._awake = trio.Event()
        self._spare_wanted = trio.Event()
        self._spare_wanted.set()
        self._released = trio.Event()

    async def run(self) -> None:
        """Start a spare process whenever one is wanted, the first at once; own each until it has
        been used."""
        while True:
            await self._spare_wanted.wait()
            self._spare_wanted = trio.Event()
            async with worker_process(self._threads, self._log_path) as child:
                self._child = child
                self._awake.set()
                await self._released.wait()
            self._released = trio.Event()

    async def ready(self) -> None:
        """Wait until there is a spare process, which the next caller of `process` gets."""
        self._spare_wanted.set()
        await self._awake.wait()

    @asynccontextmanager
    async def process(self) -> AsyncIterator[WorkerChild]:
        """The spare process, or a new one if there is none."""
        spare, self._child = self._child, None
        self._awake = trio.Event()
        if spare is None:
            async with worker_process(self._threads, self._log_path) as child:
                yield child
            return
        self._spare_wanted = trio.Event()
        try:
            yield spare
        finally:
            self._released.set()
            with trio.CancelScope(shield=True):
                await spare.wait()
