"""Contender: the run with `torch.distributed.pipelining`, 1F1B or interleaved 1F1B over gloo.

Every rank is a process with the stage boundaries of the run's manifest, the same microbatches,
optimizer and clipping by the norm of the whole model, so that its losses equal the swarm's and the
reference's; the benchmarks check this. With `chunks` a rank holds several stages (rank 0 the first
of each round); with `pipelines` that many replicas of all ranks share a step's microbatches equally
and sum their gradients.

    python -m benchmarks.throughput.torch_pipeline RUN_DIR
        --rank 0 --steps 6 --threads 1 --store S --out F

Shape suffixes: B sequences of the whole step, T positions, V vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the field's own name)
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from benchmarks.instruments.pace import Pace, pace_from_environment
from benchmarks.run_data import RunData, TimedStep, write_steps
from benchmarks.throughput.torch_stage import StageTraining
from swarm_shared.base.memory import FORWARD_SHARE
from swarm_shared.model.initialise import build_stage
from swarm_shared.run.manifest import Manifest


class PacedStage(PipelineStage):
    """Pipeline stage that computes no faster than its machine's pace."""

    def __init__(self, pace: Pace, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._pace = pace

    def forward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        started = time.monotonic()
        output = super().forward_one_chunk(*arguments, **options)
        self._pace.keep(started, FORWARD_SHARE)
        return output

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        started = time.monotonic()
        result = super().backward_one_chunk(*arguments, **options)
        self._pace.keep(started, 1 - FORWARD_SHARE)
        return result


@dataclass(slots=True)
class Part:
    """One stage that this rank holds."""

    stage: PacedStage
    training: StageTraining


@dataclass(frozen=True, slots=True)
class Place:
    """Position of this rank: `ranks` ranks make a pipeline, `pipelines` pipelines the run."""

    rank: int
    ranks: int
    pipelines: int

    @property
    def pipeline(self) -> int:
        return self.rank // self.ranks

    @property
    def position(self) -> int:
        return self.rank % self.ranks


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path, exists=True))
@click.option("--rank", type=int, required=True)
@click.option("--steps", type=int, required=True)
@click.option("--threads", type=int, required=True)
@click.option(
    "--chunks", type=int, default=1, help="Stages per rank; 2 or more: interleaved schedule."
)
@click.option("--pipelines", type=int, default=1, help="Replicas of the whole pipeline.")
@click.option(
    "--store", type=click.Path(path_type=Path), required=True, help="File for gloo's rendezvous."
)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Result file, written by rank 0."
)
def main(
    run_dir: Path, rank: int, steps: int, threads: int, chunks: int, pipelines: int, store: Path,
    out: Path,
) -> None:  # fmt: skip
    """Train as one rank of the pipeline."""
    torch.set_num_threads(threads)
    data = RunData(run_dir)
    place = Place(rank, data.manifest.stage_count // chunks, pipelines)
    world = place.ranks * pipelines
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), world),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world,
    )
    timed = _train(data, place, chunks, steps)
    if rank == 0:
        write_steps(out, timed)
    dist.barrier()
    dist.destroy_process_group()


def _train(data: RunData, place: Place, chunks: int, steps: int) -> list[TimedStep]:
    manifest = data.manifest
    along, across = _groups(place)
    parts = [
        _make_part(manifest, place.position + chunk * place.ranks, along) for chunk in range(chunks)
    ]
    microbatches = manifest.training.microbatches_per_step // place.pipelines
    # Losses are sums over tokens, divided once by the step's tokens, as in all contenders.
    schedule: Schedule1F1B | ScheduleInterleaved1F1B
    if chunks == 1:
        schedule = Schedule1F1B(parts[0].stage, microbatches, loss_fn=_loss, scale_grads=False)
    else:
        schedule = ScheduleInterleaved1F1B(
            [part.stage for part in parts], microbatches, loss_fn=_loss, scale_grads=False
        )
    timed: list[TimedStep] = []
    for step in range(1, steps + 1):
        dist.barrier()
        started = time.monotonic()
        loss_sum = _forward_and_backward(schedule, data, place, step)
        loss = _close(manifest, place, parts, across, step, loss_sum)
        dist.barrier()
        seconds = time.monotonic() - started
        timed.append(TimedStep(step, loss, manifest.tokens_per_step, seconds, time.time()))
    return timed


def _groups(place: Place) -> tuple[Any, Any]:
    """Return the process groups of this rank's pipeline and of its counterparts in the others.

    Every rank must create every group.
    """
    starts = range(0, place.ranks * place.pipelines, place.ranks)
    along = [dist.new_group(list(range(start, start + place.ranks))) for start in starts]
    across = [
        dist.new_group([start + position for start in starts]) for position in range(place.ranks)
    ]
    return along[place.pipeline], across[place.position]


def _make_part(manifest: Manifest, index: int, group: Any) -> Part:
    module = build_stage(manifest, index)
    pace = pace_from_environment(manifest.stages[index].work_flops, time.monotonic)
    stage = PacedStage(pace, module, index, manifest.stage_count, torch.device("cpu"), group=group)
    return Part(stage, StageTraining(manifest, module))


def _close(
    manifest: Manifest, place: Place, parts: list[Part], across: Any, step: int, loss_sum: float
) -> float:
    """Sum the gradients of the replicas, take the step, and return its mean loss."""
    squares = 0.0
    for part in parts:
        if place.pipelines > 1:
            dist.all_reduce(part.training.gradient, group=across)
        square = part.training.squared_norm()
        if place.pipeline == 0:
            squares += square
    totals = torch.tensor([squares, loss_sum], dtype=torch.float64)
    dist.all_reduce(totals)
    for part in parts:
        part.training.apply(step, float(totals[0]) ** 0.5)
    return float(totals[1]) / manifest.tokens_per_step


def _forward_and_backward(
    schedule: Schedule1F1B | ScheduleInterleaved1F1B, data: RunData, place: Place, step: int
) -> float:
    """Run the schedule; return the sum of losses at the last stage, zero elsewhere."""
    is_first, is_last = place.position == 0, place.position == place.ranks - 1
    arguments: list[Tensor] = []
    target_BT: Tensor | None = None
    if is_first or is_last:
        microbatches = data.microbatches(step)
        count = len(microbatches) // place.pipelines
        mine = microbatches[place.pipeline * count : (place.pipeline + 1) * count]
        if is_first:
            arguments.append(torch.from_numpy(np.concatenate([one[0] for one in mine])))
        if is_last:
            target_BT = torch.from_numpy(np.concatenate([one[1] for one in mine]))
    losses: list[Tensor] = []
    schedule.step(
        *arguments,
        target=target_BT,
        losses=losses if is_last else None,
        return_outputs=False,
    )
    return sum(float(loss.detach()) for loss in losses)


def _loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")


if __name__ == "__main__":
    main()
