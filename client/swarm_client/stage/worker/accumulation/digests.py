"""Digests of gradients, in the form in which they are added to the accumulator, and of their sums.

The digests of what crosses a boundary are `swarm_shared.identity.work_statements.wire_digest`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from swarm_client.stage.protocol.errors import RequestFailed
from swarm_client.stage.protocol.gradient_blocks import BlockDigests, gradient_digest
from swarm_client.stage.worker.accelerator import Event
from swarm_client.stage.worker.transfer.pieces_to_host import PiecesToHost
from swarm_shared.base.types import LinearDigests
from swarm_shared.identity.linear_digest import Counts, DigestKey, to_text
from swarm_shared.identity.norm_sketch import SketchKey
from swarm_shared.model.fixed_point_sums import Quantum


class GradientDigest:
    """The digest of the pieces of one microbatch's gradient, in the order of the parameters
    (`swarm_client.stage.protocol.gradient_blocks`).

    The pieces are hashed by as many threads as torch computes with: on a GPU, a stage's gradient is
    otherwise computed faster than one core hashes it.
    """

    def __init__(self, pieces: PiecesToHost | None = None, threads: int | None = None) -> None:
        """`pieces`: the reader of the device on which the gradient is; `threads`: if not torch's of
        the calling thread."""
        self._blocks = BlockDigests(threads or torch.get_num_threads())
        self._pieces = pieces
        if pieces is not None:
            pieces.begin()

    def update(self, piece: Tensor, computed: Event | None = None) -> None:
        """Add a piece: float32, on the device or in host memory. `computed`: when it is, if not
        after all that was begun so far."""
        if self._pieces is not None and not piece.is_cpu:
            self._pieces.read(piece, self._hash, computed)
            return
        self._finish()
        self._hash(piece.detach().reshape(-1).cpu())

    def _finish(self) -> None:
        if self._pieces is not None:
            self._pieces.finish(self._hash)

    def _hash(self, host: Tensor) -> None:
        # The array shares the tensor's memory.
        self._blocks.update(host.view(torch.uint8).numpy().data)

    def hex(self) -> str:
        """Return the digest of all pieces so far."""
        return gradient_digest(self.of_blocks())

    def of_blocks(self) -> bytes:
        """Return the digests of the blocks of all pieces so far."""
        self._finish()
        return self._blocks.joined()


class BackgroundDigest:
    """The digest of the pieces of one gradient on a device, made while the next microbatch is
    computed.

    The host hashes a gradient in about the time in which a fast device computes one. The pieces are
    kept until they are hashed, and must not change.
    """

    def __init__(self, pieces: PiecesToHost) -> None:
        self._pieces = pieces
        self._kept: list[Tensor] = []

    def update(self, piece: Tensor) -> None:
        """Add a piece: float32, on the device."""
        self._kept.append(piece.detach())

    def begin(self) -> Future[str]:
        """Start to hash all pieces; return the future digest."""
        computed, threads = self._pieces.now(), torch.get_num_threads()
        return self._pieces.in_background(lambda: self._digest(computed, threads))

    def _digest(self, computed: Event, threads: int) -> str:
        digest = GradientDigest(self._pieces, threads)
        for piece in self._kept:
            digest.update(piece, computed)
        digest_hex = digest.hex()
        self._kept.clear()
        return digest_hex


def counted_pieces(gradients: Iterable[Tensor], quantum: Quantum | None) -> Iterable[Tensor]:
    """The gradients as they are added: in whole counts, or in float32 where sums are not exact."""
    return gradients if quantum is None else quantum.each_counts(gradients)


def slice_digests(
    key: DigestKey | SketchKey, vectors: Sequence[Counts], stops: Sequence[int]
) -> tuple[LinearDigests, ...]:
    """The linear digests of the slices of each vector, which end at `stops`."""
    elements = len(vectors[0])
    if not stops or list(stops) != sorted(stops) or stops[-1] != elements:
        raise RequestFailed("bad_input", f"slices that are no partition of {elements} elements")
    per_slice: list[tuple[int, ...]] = []
    start = 0
    for stop in stops:
        per_slice.append(key.digests([vector[start:stop] for vector in vectors], start))
        start = stop
    return tuple(
        tuple(map(to_text, vector_digests)) for vector_digests in zip(*per_slice, strict=True)
    )
