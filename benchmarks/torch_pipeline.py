"""Contender: the run with `torch.distributed.pipelining`, Schedule1F1B over gloo.

Every stage is a process of its own, with the stage boundaries of the run's manifest, the same
microbatches, the same optimizer and the same clipping by the norm of the whole model, so that
its losses equal the swarm's and the reference's; the benchmark checks that they do.

    python -m benchmarks.torch_pipeline RUN_DIR --rank 0 --steps 6 --threads 1 --store S --out F

Shape suffixes: B sequences of the whole step, T positions, V vocabulary.
"""

from __future__ import annotations

import time
from pathlib import Path

import click
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the field's own name)
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.run_data import RunData, TimedStep, write_steps
from swarm_shared.manifest import Manifest
from swarm_shared.model.gradients import FlatLayout, bind_gradients, squared_norm
from swarm_shared.model.initialise import build_stage
from swarm_shared.model.optimizer import apply_step, make_optimizer
from swarm_shared.schedule import clip_factor, learning_rate


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path, exists=True))
@click.option("--rank", type=int, required=True)
@click.option("--steps", type=int, required=True)
@click.option("--threads", type=int, required=True)
@click.option("--store", type=click.Path(path_type=Path), required=True, help="gloo's rendezvous.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Rank 0 writes it.")
def main(run_dir: Path, rank: int, steps: int, threads: int, store: Path, out: Path) -> None:
    """Train as one stage of the pipeline."""
    torch.set_num_threads(threads)
    data = RunData(run_dir)
    stages = data.manifest.stage_count
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), stages),  # type: ignore[attr-defined]
        rank=rank,
        world_size=stages,
    )
    timed = _train(data, rank, steps)
    if rank == 0:
        write_steps(out, timed)
    dist.barrier()
    dist.destroy_process_group()


def _train(data: RunData, rank: int, steps: int) -> list[TimedStep]:
    manifest = data.manifest
    module = build_stage(manifest, rank)
    optimizer = make_optimizer(module, manifest.optimizer)
    layout = FlatLayout.of(module)
    assert layout.tied_count == 0, "this contender does not sum the gradients of a tied table"
    gradient = layout.new_flat()
    bind_gradients(module, layout, gradient)
    pipeline = PipelineStage(module, rank, manifest.stage_count, torch.device("cpu"))
    # Losses are sums over tokens and divided once by the step's tokens, as everywhere here.
    schedule = Schedule1F1B(
        pipeline, manifest.training.microbatches_per_step, loss_fn=_loss, scale_grads=False
    )
    timed: list[TimedStep] = []
    for step in range(1, steps + 1):
        dist.barrier()
        started = time.monotonic()
        loss_sum = _forward_and_backward(schedule, data, rank, step)
        gradient.div_(manifest.tokens_per_step)
        totals = torch.tensor(
            [squared_norm(gradient, layout, count_tied=True), loss_sum], dtype=torch.float64
        )
        dist.all_reduce(totals)
        norm = float(totals[0]) ** 0.5
        apply_step(
            optimizer, layout, gradient,
            learning_rate(manifest.optimizer, manifest.training.steps, step),
            clip_factor(norm, manifest.optimizer.clip_norm),
        )  # fmt: skip
        gradient.zero_()
        dist.barrier()
        timed.append(
            TimedStep(
                step,
                float(totals[1]) / manifest.tokens_per_step,
                manifest.tokens_per_step,
                time.monotonic() - started,
            )
        )
    return timed


def _forward_and_backward(schedule: Schedule1F1B, data: RunData, rank: int, step: int) -> float:
    """Run the schedule; the sum of losses at the last stage, zero elsewhere."""
    manifest: Manifest = data.manifest
    is_first, is_last = rank == 0, rank == manifest.stage_count - 1
    arguments: list[Tensor] = []
    target_BT: Tensor | None = None
    if is_first or is_last:
        microbatches = data.microbatches(step)
        if is_first:
            arguments.append(torch.from_numpy(np.concatenate([one[0] for one in microbatches])))
        if is_last:
            target_BT = torch.from_numpy(np.concatenate([one[1] for one in microbatches]))
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
