"""Token ids of the run's microbatches, read from the shards in the volunteer's folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from swarm_shared.base.types import MicrobatchIndex, Step
from swarm_shared.data.sampler import heldout_microbatch, microbatch
from swarm_shared.data.shards import open_shards
from swarm_shared.run.manifest import Manifest


class RunSamples:
    """Opens the shards once; reads by microbatch index."""

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        self._manifest = manifest
        self._train = open_shards(folder, manifest.data, "train")
        self._heldout = open_shards(folder, manifest.data, "heldout")

    def training(
        self, step: Step, microbatch_index: MicrobatchIndex
    ) -> tuple[np.ndarray, np.ndarray]:
        return microbatch(self._train, self._manifest, step, microbatch_index)

    def heldout(self, index: MicrobatchIndex) -> tuple[np.ndarray, np.ndarray]:
        return heldout_microbatch(self._heldout, self._manifest, index)
