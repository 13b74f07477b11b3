"""Manifest and microbatches of a run folder for plain torch programs, and the timed steps.

A contender reports each step as one JSON line in a file that its parent reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from swarm_coordinator.durability.run_files import load_manifest
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.history import History
from swarm_shared.data.leaf_files import ShardSamples
from swarm_shared.data.sampler import Int64
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.model_config import preset

PLAIN_BORDERS = {"codecs.activation": "none", "codecs.gradient": "none"}
"""Settings of a run without codecs between stages, which computes what plain torch computes."""


def preset_sizes(name: str) -> dict[str, object]:
    """Return a preset's own microbatches as settings, so that results stay comparable whatever
    `init` would choose."""
    chosen = preset(name)
    return {
        "training.microbatches_per_step": chosen.microbatches_per_step,
        "training.sequences_per_microbatch": chosen.sequences_per_microbatch,
    }


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One optimizer step of a contender."""

    step: int
    loss: float
    tokens: int
    seconds: float
    ended_at: float
    """Unix seconds."""


def timed_steps(history: History) -> list[TimedStep]:
    """Return the steps of a swarm's run."""
    return [
        TimedStep(one.step, one.loss, one.tokens, one.seconds, one.written_at)
        for one in history.steps
    ]


class RunData:
    """Training microbatches by step, identical to those of the swarm's trainers."""

    def __init__(self, run_dir: Path) -> None:
        folder = RunFolder.open(run_dir)
        self.manifest: Manifest = load_manifest(folder)
        self._samples = ShardSamples(folder.data, self.manifest)

    def microbatches(self, step: int) -> list[tuple[Int64, Int64]]:
        return self._samples.of_step(step)


LOSS_TOLERANCE = 1e-4
"""Largest relative difference of losses; contenders that compute the same differ only in the order
of float32 additions."""


def loss_disagreement(losses: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Describe the contender whose runs have other losses than the first one; empty if none has."""
    base = next((runs[0] for runs in losses.values() if runs), [])
    for name, runs in losses.items():
        for run in runs:
            for step, (mine, theirs) in enumerate(zip(run, base, strict=True), 1):
                if abs(mine - theirs) > LOSS_TOLERANCE * abs(theirs):
                    first = next(iter(losses))
                    return f"step {step}: {name} has {mine:.6f}, {first} has {theirs:.6f}"
    return ""


def write_steps(path: Path, steps: Sequence[TimedStep]) -> None:
    path.write_text("".join(json.dumps(asdict(step)) + "\n" for step in steps))


def read_steps(path: Path) -> list[TimedStep]:
    return [TimedStep(**json.loads(line)) for line in path.read_text().splitlines()]
