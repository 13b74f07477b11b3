"""Files between peers: tokenizer, stage snapshots, checkpoints; and the service of both kinds of
requests, for chunks of files and for leaves of the training data.

Owns TRANSFER_PROTOCOL at both ends. One stream serves one requester, one chunk per request:

    requester → holder   TransferHello (certificate), then ChunkRequest … or LeafRequest …
    holder → requester   ChunkAnswer + bytes, or LeafAnswer + leaves, in order; TransferRefused
                         ends it

A fetch takes chunks of 1 MiB from all sources at once. A source that dies, sends wrong data or
stalls is dropped and its chunks go to the others; at the end a source that has nothing left to do
is asked for what another one has not given yet. Only the hash of the whole, which comes from the
signed manifest or the coordinator, is trusted: when many sources together gave a wrong whole, each
is tried alone, the fastest first, so that one dishonest source cannot stop a download that an
honest peer could serve.

Fetching leaves is `leaf_transfer`.

Not here: which peer holds what (the catalogue), and admission (`check_remote`).
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio.to_thread
import trio

from swarm_shared.base.clock import Clock, wall
from swarm_shared.base.errors import (
    AdmissionError,
    DataError,
    FrameError,
    LinkClosed,
    NetworkError,
    ProtocolError,
    SignatureError,
    StorageError,
)
from swarm_shared.base.types import PeerId, RunId
from swarm_shared.data.leaf_files import LeafFiles
from swarm_shared.identity.credentials import check_certificate
from swarm_shared.identity.signing import decode_envelope
from swarm_shared.network import FramedStream, FrameLimits, Node
from swarm_shared.protocol import (
    TRANSFER_PROTOCOL,
    ChunkAnswer,
    ChunkRequest,
    LeafAnswer,
    LeafRequest,
    TransferHello,
    TransferRefused,
    encode,
    parse,
    transfer_messages,
)
from swarm_shared.transfer.leaf_transfer import read_leaves
from swarm_shared.transfer.part_file import CHUNK_BYTES, PartFile
from swarm_shared.transfer.places import Places
from swarm_shared.transfer.source import TransferSource

log = logging.getLogger(__name__)

T = TypeVar("T")

SERVING_LIMITS = FrameLimits(max_header_bytes=16 * 1024, max_payload_bytes=0)
FETCHING_LIMITS = FrameLimits(max_header_bytes=4 * 1024, max_payload_bytes=CHUNK_BYTES)

HELLO_SECONDS = 10.0
IDLE_SECONDS = 120.0
"""Time without a request after which a requester is disconnected."""
SEND_SECONDS = 120.0
"""Longest time for a requester to take one chunk."""
STALL_SECONDS = 30.0
"""Longest time for one chunk of 1 MiB: in 30 s that is 35 kB/s, and a slower source is not worth
waiting for."""
TAKEOVER_SECONDS = 3.0
"""Seconds after which a source that has nothing left to do is asked for chunks that others have not
given: one source could hold up the end of each download, and so each joining peer, for minutes."""
REQUESTS_IN_FLIGHT = 4
"""Requests per source; 4 MiB in flight fill a 100 Mbit/s link at 300 ms."""
TURN_SECONDS = 15.0
"""Longest time of an answer while another one waits: half of what a requester waits for it."""
MAX_CHUNK_ANSWERS = 256
"""Answers with chunks of files in memory at once: 256 MiB. Further requests wait. A stream between
two requests holds no memory."""
MAX_LEAF_ANSWERS = 256
"""Answers with leaves in memory at once: 135 MiB."""
MAX_STREAMS_PER_PEER = 8

Catalogue = Callable[[str, PeerId], Path | None]
"""(item, requester) → the file, or None when there is none for that peer. Must not block."""

CheckRemote = Callable[[PeerId, TransferHello], None]
"""Raises AdmissionError when this peer may not fetch here."""

Progress = Callable[[int, int], None]
"""(bytes present, bytes in all)."""


# ---------------------------------------------------------------- serving


def certificate_check(run: RunId, organiser: PeerId, clock: Clock = wall) -> CheckRemote:
    """Return the check that every holder makes: the requester has a valid certificate of this
    run."""

    def check(remote: PeerId, hello: TransferHello) -> None:
        if hello.run != run:
            raise AdmissionError(f"this peer serves run {run[:12]}, not {hello.run[:12]}")
        envelope = decode_envelope(hello.certificate, "the certificate")
        check_certificate(envelope, run, organiser, clock(), remote)

    return check


def serve_transfers(
    node: Node,
    catalogue: Catalogue,
    check_remote: CheckRemote,
    leaves: LeafFiles | None = None,
) -> None:
    """Answer requests for files, and for leaves if this peer has them, as long as the node
    lives."""
    server = _Server(catalogue, leaves)

    async def handle(stream: FramedStream) -> None:
        if await _is_admitted(stream, check_remote):
            with suppress(LinkClosed):
                await server.serve(stream)

    node.serve(
        TRANSFER_PROTOCOL, handle, SERVING_LIMITS, public=True,
        max_streams_per_peer=MAX_STREAMS_PER_PEER,
    )  # fmt: skip


async def _is_admitted(stream: FramedStream, check_remote: CheckRemote) -> bool:
    frame = await stream.receive(timeout_seconds=HELLO_SECONDS)
    hello = parse(transfer_messages, frame.header)
    if not isinstance(hello, TransferHello):
        raise ProtocolError(f"{stream.remote} began a transfer with {hello.kind}")
    try:
        check_remote(stream.remote, hello)
    except (AdmissionError, SignatureError, FrameError) as error:
        await _refuse(stream, str(error))
        return False
    return True


class _Server:
    """The requests of admitted peers."""

    def __init__(self, catalogue: Catalogue, leaves: LeafFiles | None) -> None:
        self._catalogue = catalogue
        self._leaves = leaves
        self._chunk_answers = Places(MAX_CHUNK_ANSWERS, TURN_SECONDS)
        self._leaf_answers = Places(MAX_LEAF_ANSWERS, TURN_SECONDS)

    async def serve(self, stream: FramedStream) -> None:
        """Answer until the stream ends, is refused, or has to give way to others."""
        while await self._answer(stream, await self._receive(stream)):
            pass

    async def _answer(self, stream: FramedStream, request: ChunkRequest | LeafRequest) -> bool:
        if isinstance(request, LeafRequest):
            return await self._leaf_answers.run(partial(self._send_leaves, stream, request))
        return await self._chunk_answers.run(partial(self._send_chunk, stream, request))

    async def _receive(self, stream: FramedStream) -> ChunkRequest | LeafRequest:
        frame = await stream.receive(timeout_seconds=IDLE_SECONDS)
        request = parse(transfer_messages, frame.header)
        if not isinstance(request, ChunkRequest | LeafRequest):
            raise ProtocolError(f"{stream.remote} sent {request.kind} instead of a request")
        return request

    async def _send_chunk(self, stream: FramedStream, request: ChunkRequest) -> bool:
        """False after a refusal, which ends the stream."""
        path = self._catalogue(request.item, stream.remote)
        if path is None:
            await _refuse(stream, f"there is no {request.item} here")
            return False
        try:
            content, digest, item_bytes = await in_thread(
                _read_chunk, path, request.offset, request.bytes
            )
        except OSError as error:
            log.warning("%s cannot be read for %s: %s", path, stream.remote, error)
            await _refuse(stream, f"{request.item} cannot be read here")
            return False
        answer = ChunkAnswer(
            item=request.item,
            offset=request.offset,
            item_bytes=item_bytes,
            sha256=digest,
        )
        await stream.send(encode(answer), content, timeout_seconds=SEND_SECONDS)
        return True

    async def _send_leaves(self, stream: FramedStream, request: LeafRequest) -> bool:
        """False after a refusal, which ends the stream."""
        if self._leaves is None:
            await _refuse(stream, "there is no training data here")
            return False
        try:
            payload = await in_thread(read_leaves, self._leaves, request)
        except DataError as error:
            log.warning("leaves cannot be read for %s: %s", stream.remote, error)
            await _refuse(stream, str(error))
            return False
        await stream.send(encode(LeafAnswer()), payload, timeout_seconds=SEND_SECONDS)
        return True


def _read_chunk(path: Path, offset: int, count: int) -> tuple[bytes, str, int]:
    with path.open("rb") as file:
        item_bytes = file.seek(0, 2)
        file.seek(min(offset, item_bytes))
        content = file.read(count)
    return content, hashlib.sha256(content).hexdigest(), item_bytes


async def _refuse(stream: FramedStream, reason: str) -> None:
    await stream.send(encode(TransferRefused(reason=reason[:500])), timeout_seconds=HELLO_SECONDS)


# ---------------------------------------------------------------- fetching


@dataclass(slots=True)
class _Fetch:
    """One item being fetched: the chunks not requested yet, and the failures of its sources."""

    node: Node
    item: str
    hello: TransferHello
    part: PartFile
    progress: Progress | None
    stall_seconds: float
    takeover_seconds: float
    open_chunks: list[int] = field(default_factory=list)
    """The chunks that no source is asked for, the next one last."""
    awaited: set[int] = field(default_factory=set)
    """The chunks that have not arrived."""
    missing: int = 0
    """Number of chunks that are not written."""
    received_bytes: int = 0
    changed: trio.Event = field(default_factory=trio.Event)
    failures: dict[PeerId, str] = field(default_factory=dict)
    chunks_from: Counter[PeerId] = field(default_factory=Counter)
    """Chunks that each source has given."""

    def begin(self, present: set[int]) -> None:
        self.open_chunks = [i for i in range(self.part.chunks) if i not in present]
        # Taken from the end: reversed, so that the file fills from its beginning.
        self.open_chunks.reverse()
        self.awaited = set(self.open_chunks)
        self.missing = len(self.open_chunks)
        self.received_bytes = sum(self.part.chunk_bytes(i) for i in present)
        self.report()

    def report(self) -> None:
        if self.progress is not None:
            self.progress(self.received_bytes, self.part.total_bytes)

    def next_chunk(self) -> int | None:
        """Take a chunk that no source is asked for; None if there is none."""
        while self.open_chunks:
            if (index := self.open_chunks.pop()) in self.awaited:
                return index
        return None

    def put_back(self, requested: Sequence[int]) -> None:
        """Give back the chunks that a source was asked for and has not given."""
        self.open_chunks.extend(reversed(requested))
        self._notify()

    async def wait_for_chunks(self) -> bool:
        """Wait until there may be chunks that no source is asked for; False where that takes
        `takeover_seconds`."""
        with trio.move_on_after(self.takeover_seconds):
            await self.changed.wait()
            return True
        return False

    def written(self, source: PeerId, size_bytes: int) -> None:
        """Record a chunk that is in the file now."""
        self.missing -= 1
        self.received_bytes += size_bytes
        self.chunks_from[source] += 1
        self.report()
        if not self.missing:
            self._notify()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


async def fetch(
    node: Node,
    sources: Sequence[TransferSource],
    item: str,
    total_bytes: int,
    sha256: str,
    destination: Path,
    certificate: str,
    run: RunId,
    progress: Progress | None = None,
    *,
    stall_seconds: float = STALL_SECONDS,
    takeover_seconds: float = TAKEOVER_SECONDS,
) -> None:
    """Bring `item` to `destination`, whole and with this hash; resumes what is there already.

    StorageError: the disk is full. NetworkError: no source is left.
    """
    hello = TransferHello(run=run, certificate=certificate)
    part = PartFile(destination, item, total_bytes, sha256)
    if await in_thread(part.is_complete):
        if progress is not None:
            progress(total_bytes, total_bytes)
        return
    work = _Fetch(node, item, hello, part, progress, stall_seconds, takeover_seconds)
    try:
        work.begin(await in_thread(part.open))
        await _fetch_and_verify(work, sources)
    finally:
        part.close()


async def _fetch_and_verify(work: _Fetch, sources: Sequence[TransferSource]) -> None:
    resumed = work.received_bytes > 0
    await _fetch_missing(work, sources)
    if await in_thread(work.part.finish):
        return
    honest = [s for s in sources if s.peer not in work.failures]
    if len(honest) == 1 and not resumed:
        work.failures[honest[0].peer] = "what it served does not have the expected hash"
        honest = []
    # The fastest first: a dishonest one may take as long as a slow link would.
    for source in sorted(honest, key=lambda candidate: -work.chunks_from[candidate.peer]):
        log.warning("%s came with a wrong hash; %s is tried alone", work.item, source.peer)
        await in_thread(work.part.restart)
        work.begin(set())
        with suppress(NetworkError):
            await _fetch_missing(work, [source])
            if await in_thread(work.part.finish):
                return
            work.failures[source.peer] = "what it served does not have the expected hash"
    await in_thread(work.part.restart)
    raise _no_source_left(work.item, work.failures)


async def _fetch_missing(work: _Fetch, sources: Sequence[TransferSource]) -> None:
    """Fetch all open chunks from all sources at once. NetworkError when the last source fails."""
    if not work.missing:
        return
    ours: list[StorageError] = []
    async with trio.open_nursery() as nursery:

        async def run(source: TransferSource) -> None:
            try:
                await _use_source(work, source)
            except StorageError as error:
                ours.append(error)
            if not work.missing or ours:
                nursery.cancel_scope.cancel()

        for source in sources:
            if source.peer not in work.failures and source.peer != work.node.peer_id:
                nursery.start_soon(run, source)
    if ours:
        raise ours[0]
    if work.missing:
        raise _no_source_left(work.item, work.failures)


async def _use_source(work: _Fetch, source: TransferSource) -> None:
    """Fetch chunks from one source until none is missing or the source fails."""
    requested: list[int] = []
    try:
        stream = await work.node.open_stream(
            source.peer, TRANSFER_PROTOCOL, FETCHING_LIMITS, source.addresses
        )
        try:
            await stream.send(encode(work.hello), timeout_seconds=work.stall_seconds)
            await _fetch_chunks(work, stream, requested)
        finally:
            await stream.reset()
    except (NetworkError, ProtocolError, AdmissionError) as error:
        work.failures[source.peer] = str(error)
        log.info("%s: %s is not used any more: %s", work.item, source.peer, error)
        work.put_back(requested)


async def _fetch_chunks(work: _Fetch, stream: FramedStream, requested: list[int]) -> None:
    while work.missing:
        while len(requested) < REQUESTS_IN_FLIGHT and (index := work.next_chunk()) is not None:
            requested.append(index)
            await _request_chunk(work, stream, index)
        if not requested and not await work.wait_for_chunks():
            for index in sorted(work.awaited)[:REQUESTS_IN_FLIGHT]:
                requested.append(index)
                await _request_chunk(work, stream, index)
        if requested:
            index = requested[0]
            content, digest = await _receive_chunk(work, stream, index)
            if index in work.awaited:
                work.awaited.remove(index)
                await in_thread(work.part.write, index, content, digest)
                work.written(stream.remote, len(content))
            requested.pop(0)


async def _request_chunk(work: _Fetch, stream: FramedStream, index: int) -> None:
    request = ChunkRequest(
        item=work.item, offset=index * CHUNK_BYTES, bytes=work.part.chunk_bytes(index)
    )
    await stream.send(encode(request), timeout_seconds=work.stall_seconds)


async def _receive_chunk(work: _Fetch, stream: FramedStream, index: int) -> tuple[bytearray, str]:
    frame = await stream.receive(timeout_seconds=work.stall_seconds)
    answer = _answer(frame.header, stream.remote)
    if (answer.item, answer.offset) != (work.item, index * CHUNK_BYTES):
        raise ProtocolError(f"{stream.remote} answered with another chunk than was asked for")
    if answer.item_bytes != work.part.total_bytes:
        raise ProtocolError(
            f"{stream.remote} has a {work.item} of {answer.item_bytes} bytes instead of "
            f"{work.part.total_bytes}"
        )
    if len(frame.payload) != work.part.chunk_bytes(index):
        raise ProtocolError(f"{stream.remote} sent a chunk of a wrong size")
    digest = await in_thread(lambda: hashlib.sha256(frame.payload).hexdigest())
    if digest != answer.sha256:
        raise SignatureError(f"a chunk from {stream.remote} does not have the hash it came with")
    return frame.payload, digest


def _answer(header: bytes, remote: PeerId) -> ChunkAnswer:
    message = parse(transfer_messages, header)
    if isinstance(message, TransferRefused):
        raise AdmissionError(f"{remote} refused: {message.reason}")
    if not isinstance(message, ChunkAnswer):
        raise ProtocolError(f"{remote} answered a chunk request with {message.kind}")
    return message


def _no_source_left(item: str, failures: dict[PeerId, str]) -> NetworkError:
    reasons = "; ".join(f"{peer}: {reason}" for peer, reason in failures.items())
    return NetworkError(
        f"{item} cannot be fetched from any peer ({reasons or 'no peer is known to have it'}); "
        f"check the connection and try again"
    )


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Run blocking code in a thread, which a cancellation does not wait for."""
    return await anyio.to_thread.run_sync(partial(function, *arguments), abandon_on_cancel=True)
