"""What an audit takes of a gradient, from its pieces one after the other.

A large stage's gradient is read from the device in the order of its parameters and is never in host
memory as a whole: beside a stage there may be no room for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_client.stage.protocol.gradient_blocks import block_range
from swarm_client.stage.protocol.slot_sizes import GRADIENT_ELEMENT_BYTES
from swarm_client.stage.worker.accumulation.digests import GradientDigest
from swarm_shared.base.types import CHECKS_PER_SECRET, LinearDigests, NormSketches
from swarm_shared.identity import norm_sketch
from swarm_shared.identity.linear_digest import DigestKey, check_seed, digest_sum, to_text
from swarm_shared.model import FlatLayout


class AuditedGradient:
    """The digests, the norm and some blocks of one microbatch's gradient as it is counted."""

    def __init__(self, elements: int, blocks: Sequence[int]) -> None:
        """`blocks`: those that are kept."""
        self._digest = GradientDigest()
        self._ranges = [block_range(block, elements * GRADIENT_ELEMENT_BYTES) for block in blocks]
        self._kept = torch.zeros(sum(map(len, self._ranges)), dtype=torch.uint8)
        self._read_bytes = 0
        self._squares = 0.0

    def add(self, host_P: Tensor) -> None:
        """Add the next piece: float32, flat, in host memory."""
        self._digest.update(host_P)
        self._keep(host_P.view(torch.uint8))
        self._squares += norm(host_P) ** 2

    def _keep(self, piece: Tensor) -> None:
        first, stop, offset = self._read_bytes, self._read_bytes + len(piece), 0
        for wanted in self._ranges:
            begin, end = max(first, wanted.start), min(stop, wanted.stop)
            if begin < end:
                place = offset + begin - wanted.start
                self._kept[place : place + end - begin] = piece[begin - first : end - first]
            offset += len(wanted)
        self._read_bytes = stop

    @property
    def block_digests(self) -> bytes:
        """The digests of all blocks, one behind the other."""
        return self._digest.of_blocks()

    @property
    def blocks_P(self) -> Tensor:  # noqa: N802
        """The kept blocks, one behind the other, in float32."""
        return self._kept.view(torch.float32)

    @property
    def norm(self) -> float:
        """The L2 norm of the whole."""
        return math.sqrt(self._squares)


class _CheckSums:
    """The linear digest and the sketch of one part of a gradient for one check."""

    def __init__(self, seed: str, part: str) -> None:
        self._key, self._sketcher = DigestKey(seed, part), norm_sketch.Sketcher(seed, part)
        self.digest, self.sketch_B = 0, norm_sketch.sketch_sum(())

    def add(self, counts_P: NDArray[np.float32], start: int) -> None:
        """Add the elements from `start` on."""
        self.digest = digest_sum((self.digest, self._key.digest(counts_P, start)))
        self.sketch_B = self.sketch_B + self._sketcher.sketch(counts_P, start)


class CellSums:
    """The linear digests and sketches of one microbatch's gradient, by which a member's sum is
    checked: of the stage's own parameters, then of the tied ones."""

    def __init__(self, layout: FlatLayout, secret: str) -> None:
        """`secret`: that from which the seeds of all checks follow."""
        seeds = [check_seed(secret, number) for number in range(CHECKS_PER_SECRET)]
        parts = {"own": layout.own_count, "tied": layout.tied_count}
        self._parts = [[_CheckSums(seed, part) for seed in seeds] for part in parts if parts[part]]
        self._own_count = layout.own_count
        self._read = 0

    def add(self, counts_P: NDArray[np.float32]) -> None:
        """Add the next piece, which is of one parameter."""
        part = int(self._read >= self._own_count and len(self._parts) > 1)
        for check in self._parts[part]:
            check.add(counts_P, self._read - part * self._own_count)
        self._read += len(counts_P)

    def digests(self) -> tuple[LinearDigests, ...]:
        """Return the digests of each part, one a check."""
        return tuple(tuple(to_text(check.digest) for check in part) for part in self._parts)

    def sketches(self) -> tuple[NormSketches, ...]:
        """Return the sketches of each part, one a check."""
        return tuple(
            tuple(norm_sketch.to_text(check.sketch_B) for check in part) for part in self._parts
        )


def norm(tensor: Tensor) -> float:
    """Return the L2 norm, summed in float64."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
