"""Contender: a trainer in the middle that calls every stage through hivemind's RemoteExpert.

    python -m benchmarks.wan.contenders.expert_trainer RUN_DIR
        --address 1.2.3.4 --folder F --steps 6 --out O

As in SWARM's public code and in Petals' fine-tuning, every activation and gradient passes through
the trainer. It keeps several microbatches in flight, so that all stages have work.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.wan.contenders.hivemind_parts import (  # isort: skip (before anything has threads)
    find_expert,
    open_dht,
    wait_for_files,
)
import click
import torch
from torch import Tensor

from benchmarks.run_data import RunData, TimedStep, write_steps
from benchmarks.wan.contenders.expert_server import APPLY, NORM

MICROBATCHES_PER_STAGE = 2
"""Microbatches in flight per stage: one is computed while another is in transfer."""


class Trainer:
    def __init__(self, data: RunData, stages: list[Any], closers: list[Any]) -> None:
        self._data = data
        self._stages = stages
        self._closers = closers

    def microbatch(self, inputs: Tensor, targets: Tensor) -> float:
        """Run forward and backward through all stages; return the sum of the losses."""
        value = inputs
        for stage in self._stages[:-1]:
            value = stage(value)
        losses = self._stages[-1](value, targets)
        losses.sum().backward()
        return float(losses.detach().double().sum())

    def step(self, number: int, pool: ThreadPoolExecutor) -> float:
        """Run one optimizer step; return its mean loss."""
        pairs = [
            (torch.from_numpy(inputs), torch.from_numpy(targets))
            for inputs, targets in self._data.microbatches(number)
        ]
        loss = sum(pool.map(lambda pair: self.microbatch(*pair), pairs))
        squares = pool.map(lambda one: self._ask(one, NORM, 0.0, number), self._closers)
        norm = sum(squares) ** 0.5
        list(pool.map(lambda one: self._ask(one, APPLY, norm, number), self._closers))
        return loss / self._data.manifest.tokens_per_step

    @staticmethod
    def _ask(closer: Any, what: float, norm: float, step: int) -> float:
        with torch.no_grad():
            return float(closer(torch.tensor([[what, norm, step]], dtype=torch.float64)))


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path, exists=True))
@click.option("--address", required=True)
@click.option(
    "--folder", type=click.Path(path_type=Path), required=True, help="Rendezvous of the processes."
)
@click.option("--steps", type=int, required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(run_dir: Path, address: str, folder: Path, steps: int, out: Path) -> None:
    """Train through the servers of all stages."""
    torch.set_num_threads(1)
    data = RunData(run_dir)
    count = data.manifest.stage_count
    servers = wait_for_files([folder / f"server-{index}.json" for index in range(count)])
    dht = open_dht(address, [place for server in servers for place in server["addresses"]])
    peers = [server["peer"] for server in servers]
    trainer = Trainer(
        data,
        [find_expert(dht, f"stage.{index}", peer) for index, peer in enumerate(peers)],
        [find_expert(dht, f"close.{index}", peer) for index, peer in enumerate(peers)],
    )
    timed: list[TimedStep] = []
    with ThreadPoolExecutor(MICROBATCHES_PER_STAGE * count) as pool:
        for number in range(1, steps + 1):
            began = time.monotonic()
            loss = trainer.step(number, pool)
            seconds = time.monotonic() - began
            tokens = data.manifest.tokens_per_step
            timed.append(TimedStep(number, loss, tokens, seconds, time.time()))
    write_steps(out, timed)
    # The parent ends hivemind's processes; hivemind's own shutdown may hang.
    os._exit(0)


if __name__ == "__main__":
    main()
