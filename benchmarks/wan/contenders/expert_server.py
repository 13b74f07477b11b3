"""Contender: one stage as an expert of hivemind's own MoE server.

    python -m benchmarks.wan.contenders.expert_server RUN_DIR --stage 0 --address 1.2.3.4 --folder F

Besides the stage it serves a second, tiny expert, `close`, which returns the squared norm of the
stage's gradients to the trainer and takes the step, so that the losses equal those of one process.

Shape suffixes: B sequences, T positions, D hidden size.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.wan.contenders.hivemind_parts import (  # isort: skip (before anything has threads)
    BatchTensorDescriptor,
    CompressionType,
    ModuleBackend,
    Server,
    open_dht,
    publish,
    wait_for_files,
)
import click
import torch
import torch.nn.functional as F  # noqa: N812 (the field's own name)
from torch import Tensor, nn

from benchmarks.instruments.pace import Pace, pace_from_environment
from benchmarks.run_data import RunData
from benchmarks.throughput.torch_stage import StageTraining
from swarm_shared.base.memory import FORWARD_SHARE
from swarm_shared.model.initialise import build_stage
from swarm_shared.model.llama import Stage
from swarm_shared.run.manifest import Manifest

HANDLERS = 4
"""Number of request handler processes; hivemind recommends four per expert."""
START_SECONDS = 60.0
NORM, APPLY = 0.0, 1.0


class PacedBackend(ModuleBackend):  # type: ignore[misc]
    """Backend that computes at its machine's pace; hivemind's backward recomputes the forward."""

    def __init__(self, pace: Pace, sequences: int, *arguments: Any, **options: Any) -> None:
        self._pace, self._sequences = pace, sequences
        super().__init__(*arguments, **options)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        started = time.monotonic()
        outputs: tuple[Tensor, ...] = super().forward(*inputs)
        self._pace.keep(started, FORWARD_SHARE * len(inputs[0]) / self._sequences)
        return outputs

    def backward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        started = time.monotonic()
        gradients: tuple[Tensor, ...] = super().backward(*inputs)
        self._pace.keep(started, len(inputs[0]) / self._sequences)
        return gradients


class ForkingFirst(Server):  # type: ignore[misc]
    """hivemind's server with its processes forked before its threads start.

    hivemind starts a thread that talks to the DHT first and forks afterwards; a forked process may
    then wait indefinitely for a lock that the thread held, as observed on a busy machine.
    """

    def begin(self) -> None:
        for process in (*self.runtime.pools, *self.conn_handlers):
            process.start()
        for handler in self.conn_handlers:
            handler.wait_until_ready(START_SECONDS)
        self.run_in_background(await_ready=True)

    def run(self) -> None:
        self.dht_handler_thread.start()
        try:
            self.runtime.run()
        finally:
            self.shutdown()


class LossStage(nn.Module):
    """Last stage; computes the loss of each sequence, summed over its tokens."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        logits_BTV = self.stage(x_BTD)
        losses = F.cross_entropy(logits_BTV.transpose(1, 2), targets_BT, reduction="none")
        return losses.sum(1, keepdim=True)


class Close(nn.Module):
    """Step close as an expert: input (1, 3) of action, norm and step; output (1, 1) of the squared
    norm, or zero."""

    def __init__(self, training: StageTraining) -> None:
        super().__init__()
        self._training = training

    def forward(self, request: Tensor) -> Tensor:
        what, norm, step = (float(value) for value in request[0])
        if what == NORM:
            return torch.tensor([[self._training.squared_norm()]], dtype=torch.float64)
        self._training.apply(int(step), norm)
        return torch.zeros((1, 1), dtype=torch.float64)


def make_backends(manifest: Manifest, index: int, compression: Any) -> dict[str, Any]:
    training, model = manifest.training, manifest.model
    tokens = BatchTensorDescriptor(model.sequence_length, dtype=torch.int64)
    activations = BatchTensorDescriptor(
        model.sequence_length, model.hidden_size, dtype=torch.float32, compression=compression
    )
    stage = build_stage(manifest, index)
    closing = Close(StageTraining(manifest, stage))
    is_last = index == manifest.stage_count - 1
    arguments = [tokens] if index == 0 else [activations]
    if is_last:
        arguments.append(tokens)
    pace = pace_from_environment(manifest.stages[index].work_flops, time.monotonic)
    sequences = training.sequences_per_microbatch
    losses = BatchTensorDescriptor(1, dtype=torch.float32)
    return {
        f"stage.{index}": PacedBackend(
            pace, sequences, name=f"stage.{index}",
            module=LossStage(stage) if is_last else stage,
            args_schema=tuple(arguments), outputs_schema=losses if is_last else activations,
            max_batch_size=sequences,
        ),
        f"close.{index}": ModuleBackend(
            name=f"close.{index}", module=closing, max_batch_size=1,
            args_schema=(BatchTensorDescriptor(3, dtype=torch.float64),),
            outputs_schema=BatchTensorDescriptor(1, dtype=torch.float64),
        ),
    }  # fmt: skip


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path, exists=True))
@click.option("--stage", type=int, required=True)
@click.option("--address", required=True)
@click.option(
    "--folder", type=click.Path(path_type=Path), required=True, help="Rendezvous of the processes."
)
@click.option("--fp16/--fp32", default=False, help="Type of activations and gradients on the wire.")
def main(run_dir: Path, stage: int, address: str, folder: Path, fp16: bool) -> None:
    """Serve one stage until a signal ends the process."""
    torch.set_num_threads(1)
    first = [] if stage == 0 else wait_for_files([folder / "server-0.json"])[0]["addresses"]
    dht = open_dht(address, first)
    compression = CompressionType.FLOAT16 if fp16 else CompressionType.NONE
    backends = make_backends(RunData(run_dir).manifest, stage, compression)
    server = ForkingFirst(dht, backends, num_connection_handlers=HANDLERS, device="cpu")
    server.begin()
    publish(folder / f"server-{stage}.json", dht)
    try:
        server.join()
    finally:
        server.shutdown()


if __name__ == "__main__":
    main()
