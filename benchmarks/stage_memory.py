"""Speed and peak memory of a stage under budgets of device memory: `make bench-memory`.

A middle stage of a preset computes microbatches on the CPU, two of them in flight, by the worker's
own code. A budget bounds what would lie on an accelerator: parameters, sums, a gradient, graphs.
Budgets take turns, so that a slow second of the machine strikes all of them. Peaks are counted in
rounds of their own, tensor by tensor.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from benchmarks.gpu_stage import MIDDLE, layers_memory, random_payload, stage_manifest
from benchmarks.live_bytes import LiveBytes
from benchmarks.markdown import markdown_table
from benchmarks.outcome import result_head, write_result
from swarm_client.stage.worker.accelerator import processor
from swarm_client.stage.worker.stage_runner import StageRunner
from swarm_coordinator.demo.run_summary import table
from swarm_shared.base.memory import MemoryOffer, StageMemory
from swarm_shared.base.types import MicrobatchIndex, Step
from swarm_shared.model import profile_layers
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.model_config import PRESETS
from swarm_shared.run.stage_cut import DEVICE_BYTES_PER_PARAMETER

OUT = Path(__file__).parent / "results" / "stage-memory.json"
PACKAGES = ("torch", "swarmtrain")
SHARES = (0.0, 0.15, 0.3, 0.5, 0.75, 1.0)
"""Budgets: how much of the memory between the least and the comfortable is added to the least."""
RESIDENT_BYTES_PER_PARAMETER = 8
"""Weights and sums, which are there before a microbatch."""
STEP = Step(1)


class BudgetedStage:
    """A stage that computes within a budget."""

    def __init__(self, manifest: Manifest, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._runner = StageRunner(manifest, MIDDLE, processor(), 0, 0)
        parameters = self._runner.layout.count
        self.resident_bytes = RESIDENT_BYTES_PER_PARAMETER * parameters
        self._runner.graphs.budget_bytes = budget_bytes - DEVICE_BYTES_PER_PARAMETER * parameters
        self._payload = random_payload(self._runner)
        self._number = 0
        self._forward()

    def seconds(self, microbatches: int) -> float:
        """Return the seconds of a microbatch: a forward pass, and the backward pass of the
        microbatch before."""
        began = time.perf_counter()
        for _ in range(microbatches):
            self._forward()
            self._runner.backward(self._number - 1, self._payload)
        return (time.perf_counter() - began) / microbatches

    def peak_bytes(self) -> int:
        with LiveBytes() as used:
            self.seconds(3)
        peak: int = used.peak
        return self.resident_bytes + peak

    def _forward(self) -> None:
        self._number += 1
        self._runner.forward(self._number, STEP, MicrobatchIndex(self._number), True, self._payload)


def measure(name: str, layers: int, microbatches: int, rounds: int) -> dict[str, Any]:
    preset = PRESETS[name].model_copy(update={"sequences_per_microbatch": 1})
    manifest = stage_manifest(preset, layers, "float32")
    memory = layers_memory(profile_layers(preset.model, preset.sequences_per_microbatch), layers)
    more = memory.comfortable_bytes - memory.device_bytes
    stages = [BudgetedStage(manifest, memory.device_bytes + int(s * more)) for s in SHARES]
    for stage in stages:
        stage.seconds(2)
    timed = [[stage.seconds(microbatches) for stage in stages] for _ in range(rounds)]
    rows = []
    for at, stage in enumerate(stages):
        ratios = [one[-1] / one[at] for one in timed]
        rows.append(
            {
                "budget_bytes": stage.budget_bytes,
                "peak_bytes": stage.peak_bytes(),
                "seconds": median(one[at] for one in timed),
                "speed": median(ratios),
                "predicted": predicted(stage.budget_bytes, memory),
            }
        )
    return {"preset": name, "layers": layers, **memory.model_dump(), "budgets": rows}


def predicted(budget_bytes: int, memory: StageMemory) -> float:
    return MemoryOffer(device_bytes=budget_bytes, host_bytes=memory.host_bytes).speed(memory)


def memory_markdown(document: Mapping[str, Any]) -> str:
    """Return the page's table."""
    stage = document["stage"]
    head = (
        f"{stage['layers']} layers of `{stage['preset']}` in float32 on "
        f"{document['threads']} threads ({document['machine']['processor']}), "
        f"{document['measured_at'][:10]}; comfortable is "
        f"{stage['comfortable_bytes'] / 1e9:.2f} GB:"
    )
    columns = (
        "budget, GB", "of the comfortable", "peak, GB", "seconds a microbatch",
        "share of full speed", "predicted",
    )  # fmt: skip
    return "\n".join([head, "", *markdown_table(columns, "rrrrrr", _cells(stage))])


def _cells(stage: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    return [
        (
            f"{row['budget_bytes'] / 1e9:.2f}",
            f"{row['budget_bytes'] / stage['comfortable_bytes']:.2f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
            f"{row['seconds']:.2f}",
            f"{row['speed']:.2f}",
            f"{row['predicted']:.2f}",
        )
        for row in stage["budgets"]
    ]


@click.command()
@click.option("--preset", default="125m", show_default=True, type=click.Choice(list(PRESETS)))
@click.option("--layers", default=5, show_default=True, type=click.IntRange(1))
@click.option("--microbatches", default=2, show_default=True, type=click.IntRange(1))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--out", default=OUT, type=click.Path(path_type=Path), help="Result file.")
def main(preset: str, layers: int, microbatches: int, rounds: int, out: Path) -> None:
    """Measure one stage within several budgets of memory."""
    stage = measure(preset, layers, microbatches, rounds)
    document = {**result_head(PACKAGES), "threads": torch.get_num_threads(), "stage": stage}
    heads = ("budget", "of comfortable", "peak", "seconds", "speed", "predicted")
    click.echo(table(heads, _cells(stage), range(len(heads))))
    write_result(out, document)
    click.echo(f"\nwritten to {out}")


if __name__ == "__main__":
    main()
