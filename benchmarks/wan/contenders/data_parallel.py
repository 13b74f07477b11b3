"""Contender: data parallelism with hivemind.Optimizer; every machine holds the whole model.

    python -m benchmarks.wan.contenders.data_parallel RUN_DIR
        --member 0 --members 4 --address 1.2.3.4 …

Each member computes microbatches at its own pace until all together have those of a step; then
hivemind averages. It ends a step by the members' progress reports, so that a step may have a
microbatch more or less: losses are close to the other contenders', not equal.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from benchmarks.wan.contenders.hivemind_parts import (  # isort: skip (before anything has threads)
    Optimizer,
    open_dht,
    publish,
    wait_for_files,
)
import click
import torch

from benchmarks.instruments.pace import pace_from_environment
from benchmarks.run_data import RunData, TimedStep, write_steps
from swarm_shared.model.initialise import build_whole
from swarm_shared.run.manifest import Manifest

MATCHMAKING_SECONDS = 3.0
"""Seconds of matchmaking, the minimum that hivemind recommends."""
AVERAGING_SECONDS = 60.0


def make_optimizer(dht: Any, manifest: Manifest, module: torch.nn.Module) -> Any:
    chosen = manifest.optimizer

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters, lr=chosen.learning_rate, betas=(chosen.beta1, chosen.beta2),
            eps=chosen.epsilon, weight_decay=chosen.weight_decay,
        )  # fmt: skip

    training = manifest.training
    return Optimizer(
        dht=dht, run_id="wan", params=list(module.parameters()), optimizer=adamw,
        target_batch_size=training.microbatches_per_step * training.sequences_per_microbatch,
        batch_size_per_step=training.sequences_per_microbatch,
        matchmaking_time=MATCHMAKING_SECONDS, averaging_timeout=AVERAGING_SECONDS, verbose=True,
    )  # fmt: skip


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path, exists=True))
@click.option("--member", type=int, required=True)
@click.option("--members", type=int, required=True)
@click.option("--address", required=True)
@click.option(
    "--folder", type=click.Path(path_type=Path), required=True, help="Rendezvous of the processes."
)
@click.option("--steps", type=int, required=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="Result file, written by member 0.",
)
def main(
    run_dir: Path, member: int, members: int, address: str, folder: Path, steps: int, out: Path
) -> None:
    """Train as one member for the given number of steps."""
    torch.set_num_threads(1)
    data = RunData(run_dir)
    manifest = data.manifest
    first = [] if member == 0 else wait_for_files([folder / "member-0.json"])[0]["addresses"]
    dht = open_dht(address, first)
    module = build_whole(manifest)
    optimizer = make_optimizer(dht, manifest, module)
    publish(folder / f"member-{member}.json", dht)
    wait_for_files([folder / f"member-{index}.json" for index in range(members)])
    pace = pace_from_environment(sum(stage.work_flops for stage in manifest.stages), time.monotonic)
    timed: list[TimedStep] = []
    began, losses, taken = time.monotonic(), [0.0], 0
    while optimizer.local_epoch < steps:
        step = optimizer.local_epoch
        microbatches = data.microbatches(step + 1)
        index = (taken * members + member) % len(microbatches)
        inputs, targets = (torch.from_numpy(part) for part in microbatches[index])
        started = time.monotonic()
        loss = module(inputs, targets) / manifest.tokens_per_microbatch
        optimizer.zero_grad()
        loss.backward()
        pace.keep(started, 1.0)
        losses.append(float(loss.detach()))
        optimizer.step()
        taken += 1
        if optimizer.local_epoch > step:
            now = time.monotonic()
            mean = sum(losses[1:]) / len(losses[1:])
            timed.append(
                TimedStep(step + 1, mean, manifest.tokens_per_step, now - began, time.time())
            )
            began, losses, taken = now, [0.0], 0
    if member == 0:
        write_steps(out, timed)
    # The parent ends hivemind's processes; hivemind's own shutdown may hang.
    os._exit(0)


if __name__ == "__main__":
    main()
