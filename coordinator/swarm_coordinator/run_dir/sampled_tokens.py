"""Digests of the token ids of each microbatch, from the shards in the run folder."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from swarm_coordinator.core.trust.samples import SampledTokens
from swarm_shared.base.types import MicrobatchIndex, Step
from swarm_shared.data.leaf_files import ShardSamples
from swarm_shared.identity.work_statements import wire_digest
from swarm_shared.run.manifest import Manifest

REMEMBERED = 8192
"""Number of microbatches whose digests are remembered: several steps of a large run."""


class RunTokens:
    """What the sampler draws, as digests of the bytes that cross the wire."""

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        self._heldout = manifest.training.heldout_microbatches
        self._samples = ShardSamples(folder, manifest)
        self.drawn = lru_cache(REMEMBERED)(self._drawn)
        """The digests of a microbatch by its step and number, held-out ones included."""

    def _drawn(self, step: Step, index: MicrobatchIndex) -> SampledTokens:
        if index in self._heldout:
            return _digests(*self._samples.heldout(index - self._heldout.start))
        return _digests(*self._samples.training(step, index))


def _digests(inputs_BT: np.ndarray, targets_BT: np.ndarray) -> SampledTokens:
    tokens, targets = (
        wire_digest(np.ascontiguousarray(array_BT, dtype="<u4").tobytes())
        for array_BT in (inputs_BT, targets_BT)
    )
    return SampledTokens(tokens, targets)
