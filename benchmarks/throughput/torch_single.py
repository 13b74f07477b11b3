"""Contender: the run in one plain torch process (`swarm_coordinator.offline.reference`).

python -m benchmarks.throughput.torch_single RUN_DIR --steps 6 --threads 2 --out FILE
"""

from __future__ import annotations

import time
from pathlib import Path

import click

from benchmarks.instruments.pace import pace_from_environment
from benchmarks.run_data import RunData, TimedStep, write_steps
from swarm_coordinator.offline.reference import StepRecord, train_reference


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path, exists=True))
@click.option("--steps", type=int, required=True)
@click.option("--threads", type=int, required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(run_dir: Path, steps: int, threads: int, out: Path) -> None:
    """Train and write the steps' times, at the pace that the environment sets, if any."""
    data = RunData(run_dir)
    work = sum(stage.work_flops for stage in data.manifest.stages)
    pace = pace_from_environment(work, time.monotonic)
    timed: list[TimedStep] = []
    began = time.monotonic()

    def keep(record: StepRecord) -> None:
        nonlocal began
        pace.keep(began, data.manifest.training.microbatches_per_step)
        now = time.monotonic()
        timed.append(TimedStep(record.step, record.loss, record.tokens, now - began, time.time()))
        began = now

    train_reference(data.manifest, data.microbatches, steps, keep, threads=threads)
    write_steps(out, timed)


if __name__ == "__main__":
    main()
