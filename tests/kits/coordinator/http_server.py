"""A run folder as the dashboard reads it, the dashboard over it, and a plain HTTP client."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import trio
import trio.to_thread
from anyio.from_thread import BlockingPortal, start_blocking_portal

from kits.coordinator import run as run_kit
from kits.coordinator import shell_world
from swarm_coordinator.configuration.http_address import HttpAddress, address_of, listen
from swarm_coordinator.core.events import Note
from swarm_coordinator.core.state.utilisation import (
    LastHeartbeat,
    Rejection,
    UtilisationStats,
)
from swarm_coordinator.dashboard.process import Dashboard
from swarm_coordinator.durability.run_files import load_identity
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.status.builder import figures_of
from swarm_coordinator.status.document import RunFigures, StatusDocument, health_of
from swarm_shared.base.types import StageIndex

ANNA, BERT = (f"12D3KooW{name * 11}" for name in ("anna", "bert"))
LEAKED = ("203.0.113.77", "2001:db8::77", "/ip4/203.0.113.78/tcp/4001", "/dns4/home.example/tcp/1")
"""Addresses in the organiser's files that must not be published."""
DEAD_AFTER_SECONDS = 4.5
HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J\u202e"


def peer(peer_id: str, stage: int | None, **changes: object) -> dict[str, Any]:
    return {
        "peer": peer_id, "name": None, "stage": stage, "phase": "ready", "version": 5,
        "leaving": False, "device": "CPU", "arithmetic": "5e0f1a2b", "reachability": "public",
        "offers_relay": False, "microbatches_per_second": 2.0, "queued": 0,
        "silent_seconds": 0.3, **changes,
    }  # fmt: skip


def status(**changes: object) -> StatusDocument:
    """A status document; `test_dashboard` checks this form with a real coordinator."""
    found: dict[str, Any] = {
        "format": 1, "running": True, "pid": 1, "time": time.time(),
        "addresses": [LEAKED[2]], "coordinator": "12D3KooWself", "run": "a run",
        "phase": "collecting", "waiting_for": "", "generation": 1, "version": 5, "steps": 9,
        "step": 6, "cells_done": 1, "cells_total": 4, "loss": 2.5, "tokens_per_second": 64.0,
        "heldout_loss": None, "work": {"counted": 20, "duplicated": 1, "cleared": 2},
        "checkpoint_version": 4, "uptime_seconds": 12.5,
        "stages": [
            {"stage": 0, "peers": 1, "microbatches_per_second": 2.0},
            {"stage": 1, "peers": 1, "microbatches_per_second": 4.0},
        ],
        "figures": figures(),
        "rebalancing": {
            "rule": "throughput", "period_seconds": 60.0, "decided": 0, "made": 0, "dropped": 0,
            "bytes_moved": 0, "on_the_way": 0, "decisions": [], "reason": "it is fine",
        },
        "peers": [
            peer(ANNA, 0, name="anna"),
            peer(BERT, 1, name=HOSTILE, flagged_times=1, flagged_reason=f"lies from {LEAKED[0]}"),
        ],
        "admission": {"mode": "open", "members": 2, "valid_tokens": 0, "bans": []},
        "sessions": 2, "sessions_ended": {"link closed": 1}, "http": {"restarts": 0},
        "paths": [
            {"reporter": ANNA, "remote": BERT, "kind": "direct", "relay": None,
             "rtt_seconds": 0.001, "bytes_per_second": 10.0},
        ],
        "links": [], **changes,
    }  # fmt: skip
    document = StatusDocument.model_validate(found)
    return document.model_copy(update={"health": health_of(document, DEAD_AFTER_SECONDS)})


def figures() -> RunFigures:
    """Ten minutes of two stages: the second one waits for half of the time."""
    made = UtilisationStats(2)
    beats = LastHeartbeat(), LastHeartbeat()
    for second in range(0, 610, 10):
        for stage, busy in enumerate((9.0, 5.0)):
            made.record(beats[stage], StageIndex(stage), busy, 10, float(second))
    made.rejected[Rejection.NOT_FINITE] = 3
    return figures_of(made)


def write_status(folder: RunFolder, **changes: object) -> None:
    made = status(coordinator=load_identity(folder).peer_id, **changes)
    folder.status.write_text(made.model_dump_json())


def run_with_pages(path: Path) -> RunFolder:
    """Five steps in its database, a status, and notes that hold what must not be shown."""
    folder = run_kit.with_a_past(shell_world.make_run(path, steps=9))
    run_kit.one_start(
        folder,
        *(Note(f"cannot reach {address} of {HOSTILE}") for address in LEAKED),
        Note("a checkpoint was stored at 12:03:44"),
    )
    write_status(folder)
    return folder


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    """Asks in a thread, as a browser somewhere else would."""

    served: Served
    pages: Dashboard
    folder: RunFolder
    token: str = field(default="")

    @property
    def address(self) -> HttpAddress:
        return self.served.address

    async def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        return await trio.to_thread.run_sync(self._get, path, method, headers)

    async def organiser(self, path: str) -> Answer:
        return await self.get(path, Authorization=f"Bearer {self.token}")

    def _get(self, path: str, method: str, headers: dict[str, str]) -> Answer:
        connection = HTTPConnection(self.address.host, self.address.port, timeout=30)
        try:
            connection.request(method, path, headers=headers)
            found: HTTPResponse = connection.getresponse()
            named = {name.lower(): value for name, value in found.getheaders()}
            return Answer(found.status, named, found.read())
        finally:
            connection.close()


@contextmanager
def serving(serve: Callable[[socket.socket], Awaitable[None]]) -> Iterator[Served]:
    """A server at a real port of this machine, in asyncio's loop in a thread of its own."""
    with closing(listen(HttpAddress("127.0.0.1", 0))) as bound:
        bound.setblocking(False)
        with start_blocking_portal() as portal:
            served = portal.start_task_soon(serve, bound)
            try:
                yield Served(portal, address_of(bound))
            finally:
                portal.call(portal.stop, True)
        if not served.cancelled():
            served.result()


@dataclass
class Served:
    portal: BlockingPortal
    address: HttpAddress

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the server's thread."""
        return await trio.to_thread.run_sync(self.portal.call, function, *arguments)

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream(self.address.host, self.address.port)


@asynccontextmanager
async def pages_of(folder: RunFolder) -> AsyncIterator[Client]:
    """The dashboard of a folder, over a real port of this machine."""
    pages = Dashboard(folder)
    with serving(pages.serve) as served:
        while pages.snapshot_loop.snapshot is None:
            await trio.sleep(0.01)
        yield Client(served, pages, folder, folder.dashboard_token())
