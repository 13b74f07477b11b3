"""Leaves of the training data between peers: the part of TRANSFER_PROTOCOL for ranges.

    requester → holder   TransferHello, then LeafRequest …
    holder → requester   LeafAnswer + for each leaf its proof and its bytes; TransferRefused ends it

The requester knows the length of every answer from the manifest before it arrives, and checks each
leaf against the signed root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm_shared.base.errors import AdmissionError, ProtocolError
from swarm_shared.data.leaf_files import LeafFiles
from swarm_shared.data.sample_ranges import LeafId, leaf_shape
from swarm_shared.network import FramedStream, FrameLimits, Node
from swarm_shared.protocol import (
    MAX_LEAVES_ASKED,
    TRANSFER_PROTOCOL,
    LeafAnswer,
    LeafRequest,
    TransferHello,
    TransferRefused,
    WantedLeaf,
    encode,
    parse,
    transfer_messages,
)
from swarm_shared.run.manifest import Manifest
from swarm_shared.transfer.source import TransferSource

LEAF_LIMITS = FrameLimits(max_header_bytes=4 * 1024, max_payload_bytes=544 * 1024)

ANSWER_SECONDS = 30.0
"""Longest time for one answer of at most 540 KiB: a slower source is 18 kB/s."""


def read_leaves(files: LeafFiles, request: LeafRequest) -> bytes:
    """Return the payload of the answer. Blocking; DataError when it cannot be read."""
    parts: list[bytes] = []
    for request_leaf in request.leaves:
        wanted = LeafId(request_leaf.shard, request_leaf.leaf)
        parts.append(files.proof(wanted))
        if request.content:
            parts.append(files.content(wanted))
    return b"".join(parts)


@dataclass(frozen=True, slots=True)
class FetchedLeaf:
    """A leaf as a holder sent it; nothing is checked yet."""

    leaf: LeafId
    proof: bytes
    content: bytes
    """Empty if only the proof was asked for."""


class LeafStream:
    """One stream to a holder; one request at a time."""

    def __init__(self, stream: FramedStream, manifest: Manifest) -> None:
        self._stream = stream
        self._manifest = manifest

    @classmethod
    async def open(
        cls, node: Node, source: TransferSource, hello: TransferHello, manifest: Manifest
    ) -> LeafStream:
        """Open a stream to a holder and send the hello. NetworkError when it cannot be reached."""
        stream = await node.open_stream(
            source.peer, TRANSFER_PROTOCOL, LEAF_LIMITS, source.addresses
        )
        try:
            await stream.send(encode(hello), timeout_seconds=ANSWER_SECONDS)
        except BaseException:
            await stream.reset()
            raise
        return cls(stream, manifest)

    async def ask(self, leaves: Sequence[LeafId], *, content: bool) -> list[FetchedLeaf]:
        """Fetch some leaves or their proofs. NetworkError, AdmissionError or ProtocolError when the
        holder cannot serve them."""
        assert len(leaves) <= MAX_LEAVES_ASKED
        request = LeafRequest(
            leaves=tuple(WantedLeaf(shard=leaf.shard, leaf=leaf.leaf) for leaf in leaves),
            content=content,
        )
        await self._stream.send(encode(request), timeout_seconds=ANSWER_SECONDS)
        frame = await self._stream.receive(timeout_seconds=ANSWER_SECONDS)
        answer = parse(transfer_messages, frame.header)
        if isinstance(answer, TransferRefused):
            raise AdmissionError(f"{self._stream.remote} refused: {answer.reason}")
        if not isinstance(answer, LeafAnswer):
            raise ProtocolError(f"{self._stream.remote} answered leaves with {answer.kind}")
        return self._cut(leaves, frame.payload, content=content)

    def _cut(
        self, leaves: Sequence[LeafId], payload: bytes | bytearray, *, content: bool
    ) -> list[FetchedLeaf]:
        fetched: list[FetchedLeaf] = []
        shapes = [leaf_shape(self._manifest, leaf) for leaf in leaves]
        sizes = [shape.size_bytes if content else 0 for shape in shapes]
        if len(payload) != sum(sizes) + sum(shape.proof_bytes for shape in shapes):
            raise ProtocolError(f"{self._stream.remote} sent leaves of a wrong size")
        start = 0
        for leaf, shape, size in zip(leaves, shapes, sizes, strict=True):
            middle = start + shape.proof_bytes
            end = middle + size
            fetched.append(
                FetchedLeaf(leaf, bytes(payload[start:middle]), bytes(payload[middle:end]))
            )
            start = end
        return fetched

    async def close(self) -> None:
        await self._stream.reset()
