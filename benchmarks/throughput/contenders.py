"""Contenders of the throughput benchmark.

Each takes a run folder, trains a few steps in its own processes, ends them all, and returns the
times of its steps. Contenders are independent of each other.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.instruments.inside import own_command
from benchmarks.run_data import TimedStep, read_steps, timed_steps
from swarm_coordinator.demo.local_swarm import LocalSwarm
from swarm_coordinator.demo.subprocesses import (
    Subprocesses,
    run_to_end,
    wait_until,
)

LIMIT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of the throughput table."""

    name: str
    stages: int
    processes: int
    """Number of processes that compute; a swarm has further processes for networking."""
    compute_threads: int
    """Threads of each of these processes."""


TORCH_SINGLE = Contender("torch, one process", 1, 1, 2)
SWARM_2X1 = Contender("swarm, 2 stages x 1 peer", 2, 2, 1)
SWARM_2X2 = Contender("swarm, 2 stages x 2 peers", 2, 4, 1)
SWARM_4X1 = Contender("swarm, 4 stages x 1 peer", 4, 4, 1)
PIPELINE_2 = Contender("torch 1F1B over gloo, 2 stages", 2, 2, 1)
PIPELINE_4 = Contender("torch 1F1B over gloo, 4 stages", 4, 4, 1)

CONTENDERS: dict[str, Contender] = {
    "torch": TORCH_SINGLE,
    "swarm-2x1": SWARM_2X1,
    "swarm-2x2": SWARM_2X2,
    "swarm-4x1": SWARM_4X1,
    "1f1b-2": PIPELINE_2,
    "1f1b-4": PIPELINE_4,
}


def run_contender(
    contender: Contender, template: Path, work: Path, steps: int
) -> Sequence[TimedStep]:
    """Train `steps` steps; `template` is a run folder with the contender's number of stages."""
    work.mkdir(parents=True)
    if contender is TORCH_SINGLE:
        return _torch_single(contender, template, work, steps)
    if contender in (PIPELINE_2, PIPELINE_4):
        return _torch_pipeline(contender, template, work, steps)
    return _swarm(contender, template, work)


def _torch_single(
    contender: Contender, run_dir: Path, work: Path, steps: int
) -> Sequence[TimedStep]:
    out = work / "steps.jsonl"
    words = [str(run_dir), "--steps", str(steps), "--out", str(out)]
    words += ["--threads", str(contender.compute_threads)]
    run_to_end(
        "the torch process",
        own_command("benchmarks.throughput.torch_single", *words),
        LIMIT_SECONDS,
    )
    return read_steps(out)


def _torch_pipeline(
    contender: Contender, run_dir: Path, work: Path, steps: int
) -> Sequence[TimedStep]:
    out = work / "steps.jsonl"
    threads = str(contender.compute_threads)
    with Subprocesses() as children:
        for rank in range(contender.stages):
            words = [str(run_dir), "--rank", str(rank), "--steps", str(steps)]
            words += ["--threads", threads, "--store", str(work / "store"), "--out", str(out)]
            children.start(
                f"rank {rank}",
                own_command("benchmarks.throughput.torch_pipeline", *words),
                work / f"rank-{rank}.out",
                {"OMP_NUM_THREADS": threads},
            )
        wait_until(
            lambda: all(child.exit_code() == 0 for child in children.started), children,
            LIMIT_SECONDS, "the pipeline",
        )  # fmt: skip
    return read_steps(out)


def _swarm(contender: Contender, template: Path, work: Path) -> Sequence[TimedStep]:
    """Train the run's configured number of steps, so that the run ends normally."""
    run_dir = work / "run"
    shutil.copytree(template, run_dir)
    with Subprocesses() as children:
        swarm = LocalSwarm(run_dir, children, contender.compute_threads)
        invite = swarm.start_coordinator()
        # Stages are assigned explicitly, so that every repetition measures the same swarm.
        for peer in range(contender.processes):
            swarm.start_volunteer(invite, stage=peer % contender.stages)
        finished = swarm.watch()
        swarm.wait_for_exit()
    return timed_steps(finished)
