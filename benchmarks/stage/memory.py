"""Speed and peak memory of a stage under budgets of device memory: `make bench-memory`.

A middle stage of a preset computes microbatches on the CPU, two of them in flight, by the worker's
own code. A budget bounds what would lie on an accelerator: parameters, sums, a gradient, graphs.
Budgets take turns, so that a slow second of the machine strikes all of them. Peaks are counted in
rounds of their own, tensor by tensor. Below the least budget weights lie in host memory, and are
copied at the rate of an engine that is as fast beside this processor as PCIe beside a card
(`benchmarks.stage.throttled_copies`). Two budgets are measured once more with graphs in host
memory.

    make bench-memory ARGS=--least

computes stages of the large presets in the least memory that they are said to need, and says their
peaks. It takes 13 GB of memory and, on two cores, half an hour.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.outcome import RESULTS, conclude, result_head
from benchmarks.pages.markdown import headed_table
from benchmarks.stage.live_bytes import LiveBytes
from benchmarks.stage.middle_stage import MIDDLE, layers_memory, random_payload, stage_manifest
from benchmarks.stage.throttled_copies import throttled_processor
from swarm_client.stage.worker.accelerator import Accelerator, processor
from swarm_client.stage.worker.stage_runner import StageRunner
from swarm_shared.base.memory import MachineBalance, MemoryOffer, StageMemory, StreamedWork
from swarm_shared.base.types import MicrobatchIndex, Step
from swarm_shared.model import profile_layers
from swarm_shared.model.layer_seconds import LayerSeconds, places
from swarm_shared.run.graph_sizes import GRAPHS
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.model_config import PRESETS
from swarm_shared.run.stage_cut import (
    DEVICE_BYTES_PER_PARAMETER,
    WEIGHT_BYTES,
    LayerMatrices,
)
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes

PACKAGES = ("torch", "swarmtrain")
SHARES = (0.0, 0.15, 0.3, 0.5, 0.75, 1.0)
"""Budgets: how much of the memory between the least and the comfortable is added to the least."""
STREAMED_SHARES = (1.0, 0.5)
"""Budgets below the least: how much of the weights that may lie in host memory do so."""
COPIED_SHARE = 0.9
"""Seconds of copying all matrices for each pass, over those of computing a microbatch: about those
of a card that computes 15 TFLOP/s on 2,048 tokens and copies 12 GB/s."""
OFFLOADED_SHARES = (0.3, 0.5)
"""Budgets with graphs in host memory, whose copies take `COPIED_SHARE` of a forward pass."""
PLANNED_MICROBATCHES = 6
"""So many plans are read for the prediction of copied graphs, as those of microbatches differ."""
PASSES = 3
"""Forward, again, and backward."""
LEAST = (("1b", 3), ("7b", 2))
"""Presets, and the layers of the largest of their inner stages."""
LEAST_MICROBATCHES = 2
RESIDENT_BYTES_PER_PARAMETER = 8
"""Weights and sums, which are there before a microbatch."""
STEP = Step(1)
PLENTY = 2**40


class BudgetedStage:
    """A stage that computes within a budget."""

    def __init__(
        self, manifest: Manifest, budget_bytes: int, streamed_bytes: int = 0,
        copied_per_second: float = 0.0, graphs_on_host: LayerSeconds | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:  # fmt: skip
        """With an `accelerator` what copies and layers take is measured there."""
        self.budget_bytes = budget_bytes
        self.streamed_bytes = streamed_bytes
        self.graphs_on_host = graphs_on_host
        is_real, self._now = accelerator is not None, time.perf_counter
        accelerator = accelerator or processor()
        if copied_per_second:
            accelerator, clock = throttled_processor(copied_per_second)
            self._now = clock.now
        self._runner = StageRunner(
            manifest, MIDDLE, accelerator, 0, 0,
            streamed_bytes=streamed_bytes, host_graph_bytes=PLENTY if graphs_on_host else 0,
        )  # fmt: skip
        self._runner.graphs.seconds = graphs_on_host
        parameters = self._runner.layout.count
        self.resident_bytes = RESIDENT_BYTES_PER_PARAMETER * parameters - self._freed_bytes()
        self._runner.graphs.budget_bytes = (
            budget_bytes + streamed_bytes - DEVICE_BYTES_PER_PARAMETER * parameters
        )
        self._payload = random_payload(self._runner)
        self._number = 0
        if is_real and graphs_on_host is not None:
            self._runner.warm_up()
            self.graphs_on_host = self._runner.graphs.seconds
        self._forward()

    def _freed_bytes(self) -> int:
        stream = self._runner.parameter_sets.weights
        if stream is None:
            return 0
        moved = [one.weight.nbytes for one in self._runner.stage.matrices() if one.host_weights]
        return sum(moved) - stream.nbytes

    def predicted_with_copies(self) -> float | None:
        """Return the share of full speed by the worker's own plans for some microbatches and its
        cost model; None without copies of graphs."""
        seconds = self.graphs_on_host
        if seconds is None:
            return None
        layers = self._runner.graphs.sizes.layers
        planned: list[float] = []
        for _ in range(PLANNED_MICROBATCHES):
            self._forward()
            graph = self._runner._in_flight[self._number - 1].graph
            again, copied = layers, 0
            if graph is not None:
                again, copied = graph.recomputed_layers, graph.offloaded_layers
            planned.append(seconds.microbatch(places(layers, again + copied, copied)))
            self._runner.backward(self._number - 1, self._payload)
        return seconds.microbatch(places(layers, 0, 0)) / mean(planned)

    def seconds(self, microbatches: int) -> float:
        """Return the seconds of a microbatch: a forward pass, and the backward pass of the
        microbatch before."""
        began = self._now()
        for _ in range(microbatches):
            self._forward()
            self._runner.backward(self._number - 1, self._payload)
        return (self._now() - began) / microbatches

    def sums(self) -> Tensor:
        """Return the sums of all gradients so far."""
        return self._runner.accumulator.totals()

    def close(self) -> None:
        """Drop the microbatch in flight, whose graph would keep the stage's memory."""
        self._runner.discard(self._number)

    def peak_bytes(self, microbatches: int = 3) -> int:
        with LiveBytes() as used:
            self.seconds(microbatches)
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
    matrices_bytes = WEIGHT_BYTES * layers * LayerMatrices.of(preset.model).total
    copied_per_second = PASSES * matrices_bytes / (COPIED_SHARE * stages[0].seconds(microbatches))
    streaming: list[BudgetedStage] = []
    for share in STREAMED_SHARES:
        streamed = int(share * memory.streamable_bytes)
        budget_bytes = memory.device_bytes - streamed
        streaming.append(BudgetedStage(manifest, budget_bytes, streamed, copied_per_second))
        streaming[-1].seconds(2)
    stages = streaming + stages
    comfortable = len(stages) - 1
    stages += _offloading(manifest, memory, layers, stages[-1].seconds(microbatches))
    timed = [[stage.seconds(microbatches) for stage in stages] for _ in range(rounds)]
    rows = []
    for at, stage in enumerate(stages):
        ratios = [one[comfortable] / one[at] for one in timed]
        rows.append(
            {
                "budget_bytes": stage.budget_bytes,
                "streamed_bytes": stage.streamed_bytes,
                "graphs_on_host": stage.graphs_on_host is not None,
                "peak_bytes": stage.peak_bytes(),
                "seconds": median(one[at] for one in timed),
                "speed": median(ratios),
                "predicted_with_copies": stage.predicted_with_copies(),
            }
        )
    return {
        "preset": name,
        "layers": layers,
        "copied_bytes_per_second": copied_per_second,
        **memory.model_dump(),
        "budgets": rows,
    }


def measure_least(name: str, layers: int) -> list[dict[str, Any]]:
    """Compute microbatches of a middle stage in the least memory of a device, and in the least with
    weights in host memory; return the peaks."""
    preset = PRESETS[name].model_copy(update={"sequences_per_microbatch": 1})
    manifest = stage_manifest(preset, layers, "float32")
    memory = layers_memory(profile_layers(preset.model, preset.sequences_per_microbatch), layers)
    rows = []
    for streamed in (0, memory.streamable_bytes):
        budget_bytes = memory.device_bytes - streamed
        stage = BudgetedStage(manifest, budget_bytes, streamed, PLENTY if streamed else 0.0)
        rows.append(
            {
                "preset": name,
                "layers": layers,
                "parameters": stage_sizes(manifest)[MIDDLE].parameters,
                "budget_bytes": budget_bytes,
                "streamed_bytes": streamed,
                "peak_bytes": stage.peak_bytes(LEAST_MICROBATCHES),
            }
        )
        del stage
    return rows


def _offloading(
    manifest: Manifest, memory: StageMemory, layers: int, seconds: float
) -> list[BudgetedStage]:
    """Return stages whose graphs may wait in host memory, if a microbatch takes so many seconds
    with all of them kept."""
    forward = seconds / (PASSES * layers)
    takes = LayerSeconds(forward, COPIED_SHARE * forward)
    more = memory.comfortable_bytes - memory.device_bytes
    graphs_bytes = (
        memory.comfortable_bytes
        - DEVICE_BYTES_PER_PARAMETER * stage_sizes(manifest)[MIDDLE].parameters
    )
    layer_bytes = graphs_bytes / GRAPHS / layers
    per_second = layer_bytes / takes.copy
    found = [
        BudgetedStage(manifest, memory.device_bytes + int(share * more), 0, per_second, takes)
        for share in OFFLOADED_SHARES
    ]
    for stage in found:
        stage.seconds(2)
    return found


class ProcessorsWork(StreamedWork):
    """Work of a processor, which begins the next copy when a product is done: copies hide behind
    gradients of weights only. No gradient comes back, as it is there already."""

    def slowdown(self, balance: MachineBalance | None, *, recomputed: bool) -> float:
        forwards = 2 if recomputed else 1
        # A forward pass takes 1, a backward pass 2.
        copy = COPIED_SHARE / PASSES * (forwards + 2)
        return (forwards * (1 + copy) + 1 + max(1.0, copy)) / (forwards + 2)


def predicted(budget_bytes: int, memory: StageMemory) -> float:
    host_bytes = memory.host_bytes + memory.streamable_bytes + memory.stream_buffer_bytes
    offer = MemoryOffer(device_bytes=budget_bytes, host_bytes=host_bytes)
    return offer.speed(memory, ProcessorsWork(intensity=1.0))


def memory_markdown(document: Mapping[str, Any]) -> str:
    """Return the page's table."""
    stage = document["stage"]
    head = (
        f"{stage['layers']} layers of `{stage['preset']}` in float32 on "
        f"{document['threads']} threads ({document['machine']['processor']}), "
        f"{document['measured_at'][:10]}; comfortable is "
        f"{stage['comfortable_bytes'] / 1e9:.2f} GB, and weights in host memory are copied at "
        f"{stage['copied_bytes_per_second'] / 1e6:.0f} MB/s:"
    )
    columns = (
        "budget, GB", "of the comfortable", "weights in host memory, GB", "peak, GB",
        "seconds a microbatch", "share of full speed", "predicted",
    )  # fmt: skip
    return headed_table(head, columns, "rrrrrrr", _cells(stage))


def least_markdown(document: Mapping[str, Any]) -> str:
    """Return the page's table of the large presets."""
    columns = (
        "an inner stage of",
        "parameters",
        "weights in host memory, GB",
        "least, GB",
        "peak, GB",
    )
    rows = [
        (
            f"`{row['preset']}`, {row['layers']} layers",
            f"{row['parameters'] / 1e6:.0f} M",
            f"{row['streamed_bytes'] / 1e9:.2f}",
            f"{row['budget_bytes'] / 1e9:.2f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
        )
        for row in document["rows"]
    ]
    head = (
        f"{LEAST_MICROBATCHES} microbatches of one sequence in float32, "
        f"{document['measured_at'][:10]}:"
    )
    return headed_table(head, columns, "lrrrr", rows)


def _cells(stage: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    memory = StageMemory(**{name: stage[name] for name in StageMemory.model_fields})
    return [
        (
            f"{row['budget_bytes'] / 1e9:.2f}",
            f"{row['budget_bytes'] / stage['comfortable_bytes']:.2f}",
            f"{row['streamed_bytes'] / 1e9:.2f}" + (" and graphs" if row["graphs_on_host"] else ""),
            f"{row['peak_bytes'] / 1e9:.2f}",
            f"{row['seconds']:.2f}",
            f"{row['speed']:.2f}",
            f"{row['predicted_with_copies'] or predicted(row['budget_bytes'], memory):.2f}",
        )
        for row in stage["budgets"]
    ]


@click.command()
@click.option("--preset", default="125m", show_default=True, type=click.Choice(list(PRESETS)))
@click.option("--layers", default=5, show_default=True, type=click.IntRange(1))
@click.option("--microbatches", default=2, show_default=True, type=click.IntRange(1))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--least", is_flag=True, help="Stages of 1b and 7b in the least memory instead.")
@click.option("--out", type=click.Path(path_type=Path), help=f"Default: under {RESULTS.name}/.")
def main(
    preset: str, layers: int, microbatches: int, rounds: int, least: bool, out: Path | None
) -> None:
    """Measure one stage within several budgets of memory."""
    if least:
        rows = [row for one in LEAST for row in measure_least(*one)]
        document = {**result_head(PACKAGES), "rows": rows}
        conclude(out or RESULTS / "stage-memory-least.json", document, least_markdown)
        return
    stage = measure(preset, layers, microbatches, rounds)
    document = {**result_head(PACKAGES), "threads": torch.get_num_threads(), "stage": stage}
    conclude(out or RESULTS / "stage-memory.json", document, memory_markdown)


if __name__ == "__main__":
    main()
