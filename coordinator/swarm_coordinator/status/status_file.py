"""status.json: written by the coordinator about once a second, complete at any moment.

Owns the file: writing it without delaying the event loop, and reading it. Reading needs no running
coordinator; whether one runs is known by the run folder's lock.
"""

from __future__ import annotations

import heapq
import operator
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio.lowlevel
import anyio.to_thread
from pydantic import TypeAdapter, ValidationError

from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.status.builder import document_without_peers, peer_row
from swarm_coordinator.status.document import (
    LinkRow,
    PathRow,
    PeerRow,
    StatusDocument,
    health_of,
)
from swarm_coordinator.status.pacing import batched, with_duty_cycle
from swarm_shared.base.atomic_file import write_atomically
from swarm_shared.base.errors import StorageError
from swarm_shared.base.types import PeerId
from swarm_shared.protocol import LinkBytes, LinkPath

MAX_LINKS = 500
"""Links in the file, those with the most bytes; the database holds all of them."""
ROWS_PER_TURN = 100
"""Table rows made or encoded before other tasks run: less than a millisecond of work."""
REPORTERS_PER_TURN = 25
"""Reporters whose paths are converted in one turn; in a large run each reports about ten."""


Links = Mapping[PeerId, tuple[LinkBytes, ...]]
Paths = Mapping[PeerId, tuple[LinkPath, ...]]
"""The newest report of every attached peer, and the coordinator's own."""


async def write_status(
    path: Path, state: RunState, now: float, links: Links, paths: Paths, **server: object
) -> float:
    """Write the file. `now` is on the core's clock; `server` are the fields of the document that
    the core does not know. Returns the CPU seconds that this took, here and in a thread.

    StorageError when the file cannot be written.
    """
    began = time.thread_time()
    document = document_without_peers(state, now).model_copy(update=server)
    seconds = time.thread_time() - began
    peers, of_rows = await _peer_rows(state, now)
    seconds += of_rows
    document = document.model_copy(update={"peers": peers})
    dead_after_seconds = state.manifest.limits.dead_after_seconds
    return seconds + await anyio.to_thread.run_sync(
        _write, path, document, links, paths, dead_after_seconds
    )


async def _peer_rows(state: RunState, now: float) -> tuple[tuple[PeerRow, ...], float]:
    """The rows and the CPU seconds that they took. Rows are made a few at a time; a peer that
    leaves meanwhile is described as it was."""
    rows: list[PeerRow] = []
    seconds = 0.0
    for batch in batched(list(state.peers.values()), ROWS_PER_TURN):
        began = time.thread_time()
        rows += (peer_row(state, peer, now) for peer in batch)
        seconds += time.thread_time() - began
        await anyio.lowlevel.checkpoint()
    return tuple(rows), seconds


def _write(
    path: Path, document: StatusDocument, links: Links, paths: Paths, dead_after_seconds: float
) -> float:
    """Runs in a thread, because a large document takes longer than heartbeats should wait. Returns
    the CPU seconds that it took."""
    began = time.thread_time()
    rest = {
        "health": health_of(document, dead_after_seconds),
        "paths": path_rows(paths),
        "links": link_rows(links),
    }
    write_atomically(path, encode_document(document.model_copy(update=rest)))
    return time.thread_time() - began


_TABLES: dict[str, TypeAdapter[Any]] = {
    "peers": TypeAdapter(list[PeerRow]),
    "paths": TypeAdapter(list[PathRow]),
    "links": TypeAdapter(list[LinkRow]),
}


def encode_document(document: StatusDocument) -> bytes:
    """The document as JSON, the same bytes as `model_dump_json` but for the order of the fields.

    The encoder holds the interpreter lock, so tables are encoded a few rows at a time, with pauses.
    """
    parts = [document.model_dump_json(exclude=set(_TABLES)).encode()[:-1]]
    for name, adapter in _TABLES.items():
        batches = with_duty_cycle(batched(getattr(document, name), ROWS_PER_TURN))
        rows = b",".join(adapter.dump_json(batch)[1:-1] for batch in batches)
        parts.append(b',"%b":[%b]' % (name.encode(), rows))
    return b"".join((*parts, b"}"))


def link_rows(links: Links) -> tuple[LinkRow, ...]:
    found = (
        (link.sent + link.received, reporter, link)
        for reporters in with_duty_cycle(batched(links.items(), ROWS_PER_TURN))
        for reporter, reported in reporters
        for link in reported
    )
    largest = heapq.nlargest(MAX_LINKS, found, key=operator.itemgetter(0))
    return tuple(
        LinkRow(reporter, link.remote, link.protocol, link.sent, link.received)
        for _, reporter, link in largest
    )


def path_rows(paths: Paths) -> tuple[PathRow, ...]:
    return tuple(
        PathRow(
            reporter, path.remote, path.kind.value, path.relay, path.rtt_seconds,
            path.bytes_per_second,
        )
        for reporters in with_duty_cycle(batched(paths.items(), REPORTERS_PER_TURN))
        for reporter, reported in reporters
        for path in reported
    )  # fmt: skip


def read_status(path: Path) -> StatusDocument | None:
    """The last document written; None when the run has never been started."""
    try:
        return StatusDocument.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read ({error.strerror}); delete it, the coordinator rewrites it"
        ) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise StorageError(
                f"{path} cannot be read ({first['msg']}); delete it, the coordinator rewrites it"
            ) from error
        place = ".".join(str(part) for part in first["loc"]) or "the document"
        raise StorageError(
            f"{path} is not a status of this version ({place}: {first['msg']}); use the "
            "swarm-coordinator that wrote it, or delete the file, which a coordinator rewrites"
        ) from error
