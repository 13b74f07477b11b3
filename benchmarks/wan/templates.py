"""Run folders that contenders copy or read: one model with different numbers of stages and
codecs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.wan.mixes import Training
from swarm_coordinator.run_creation.initialise import initialise_run
from swarm_shared.run.codec_sizes import ActivationCodec
from swarm_shared.run.manifest import Manifest

PRESET = "tiny"
CHANGES = {
    "model.layers": 8, "training.sequences_per_microbatch": 4,
    "training.evaluation_microbatches": 0, "network.listen_host": "0.0.0.0",
    "rebalancing.rule": "none",
}  # fmt: skip
"""Settings of the model, unless a mix has others; eight layers allow two chunks on each of four
machines (interleaved 1F1B)."""


class Templates:
    """Run folders of one mix's training, created on first use."""

    def __init__(self, folder: Path, steps: int, training: Training) -> None:
        self._folder = folder
        self._steps = steps
        self._training = training
        self._made: dict[tuple[int, int, str, int], tuple[Path, Manifest]] = {}

    def folder(
        self, stages: int, peers_per_stage: int, codec: ActivationCodec = "none", staleness: int = 0
    ) -> Path:
        """Return a run folder whose first step waits for the given number of peers per stage."""
        return self._make(stages, peers_per_stage, codec, staleness)[0]

    def manifest(self) -> Manifest:
        return self._make(self._training.stages, 1, "none", 0)[1]

    def _make(
        self, stages: int, peers: int, codec: ActivationCodec, staleness: int
    ) -> tuple[Path, Manifest]:
        key = (stages, peers, codec, staleness)
        if key not in self._made:
            path = self._folder / f"{stages}-stages-{peers}-peers-{codec}-{staleness}-late"
            changes = {
                **CHANGES, **self._training.settings,
                "run.name": "wan", "training.steps": self._steps,
                "training.microbatches_per_step": self._training.microbatches_per_step,
                "checkpoint.every_steps": self._steps, "limits.starting_peers_per_stage": peers,
                "codecs.activation": codec, "codecs.gradient": codec,
                "training.staleness": staleness,
            }  # fmt: skip
            manifest = initialise_run(path, PRESET, stages=stages, overrides=changes)
            self._made[key] = (path, manifest)
        return self._made[key]
