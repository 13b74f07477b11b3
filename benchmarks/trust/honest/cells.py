"""The cells of a small run: its states at some versions, and what each stage gets of a microbatch.

One process trains both stages with the volunteers' own code, microbatch by microbatch, and keeps
what crosses; every machine then computes the same cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.run_data import RunData
from swarm_client.stage.worker.accelerator import processor
from swarm_client.stage.worker.accumulation.accumulator import KeptMicrobatch
from swarm_client.stage.worker.stage_runner import BackwardResult, StageRunner
from swarm_client.stage.worker.step_runner import StepRunner
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step, Version
from swarm_shared.data.sampler import Int64
from swarm_shared.run.codec_sizes import ActivationCodec, GradientCodec
from swarm_shared.run.manifest import CodecsConfig, Manifest
from swarm_shared.run.model_config import ComputeDtype
from swarm_shared.run.schedule import learning_rate

MEMORY_BYTES = 2**30
STAGES = 2
CPU = processor()


@dataclass(frozen=True, slots=True)
class Setting:
    """A dtype and a pair of codecs."""

    dtype: ComputeDtype
    activation: ActivationCodec
    gradient: GradientCodec

    @property
    def name(self) -> str:
        return f"{self.dtype}, {self.activation} / {self.gradient}"

    def manifest(self, base: Manifest) -> Manifest:
        codecs = CodecsConfig(activation=self.activation, gradient=self.gradient, average="exact")
        training = base.training.model_copy(update={"dtype": self.dtype})
        return base.model_copy(update={"training": training, "codecs": codecs})


def runner_of(
    manifest: Manifest, stage: int, kind: type[StageRunner] = StageRunner
) -> StageRunner:  # fmt: skip
    return kind(manifest, StageIndex(stage), CPU, MEMORY_BYTES, MEMORY_BYTES)


def in_slot(runner: StageRunner, payload: bytes) -> memoryview:
    slot = memoryview(bytearray(runner.sizes.slot_bytes))
    slot[: len(payload)] = payload
    return slot


def state_file(folder: Path, version: int, stage: int) -> Path:
    return folder / f"state-{version}-{stage}"


def cell_file(folder: Path, version: int, microbatch: int, stage: int) -> Path:
    return folder / f"cell-{version}-{microbatch}-{stage}"


def write_cells(
    data: RunData, setting: Setting, versions: Sequence[int], microbatches: int, folder: Path
) -> None:
    """Train up to the last of `versions`, and write the states and cells of each of them."""
    torch.set_num_threads(1)
    manifest = setting.manifest(data.manifest)
    runners = [runner_of(manifest, stage) for stage in range(STAGES)]
    steps = [StepRunner(runner) for runner in runners]
    for version in range(versions[-1] + 1):
        kept = version in versions
        if kept:
            for stage, step in enumerate(steps):
                step.save(state_file(folder, version, stage), Version(version))
        drawn = data.microbatches(version + 1)
        for number, tokens in enumerate(drawn[: microbatches if kept else None]):
            cells = _through(runners, Step(version + 1), number, tokens)
            for stage, cell in enumerate(cells if kept else ()):
                content = bytes(cell.inputs) + bytes(cell.output_gradient)
                cell_file(folder, version, number, stage).write_bytes(content)
        if version < versions[-1]:
            _apply(runners, steps, Step(version + 1))


def _through(
    runners: Sequence[StageRunner], step: Step, number: int, tokens: tuple[Int64, Int64]
) -> tuple[KeptMicrobatch, KeptMicrobatch]:
    """One microbatch through both stages and back; what each of them got."""
    first, last = runners
    microbatch, request = MicrobatchIndex(number), number + 1
    ids, targets = (part.astype(np.uint32).tobytes() for part in tokens)
    slot = in_slot(first, ids)
    result = first.forward(request, step, microbatch, True, slot[: len(ids)])
    assert not isinstance(result, BackwardResult), "the first stage waits for its gradient"
    output = slot[: first.codec.write_output(result.output, slot)]
    first.output_sent(request, output)
    sent = output.tobytes() + targets
    slot = in_slot(last, sent)
    back = last.forward(request, step, microbatch, True, slot[: len(sent)])
    assert isinstance(back, BackwardResult)
    assert back.input_gradient is not None
    gradient = slot[: last.codec.write_input_gradient(back.input_gradient, slot)].tobytes()
    _count(last, request, back, memoryview(gradient))
    _count(first, request, first.backward(request, in_slot(first, gradient)[: len(gradient)]), None)
    return (
        KeptMicrobatch(bytearray(ids), bytearray(gradient)),
        KeptMicrobatch(bytearray(sent), bytearray()),
    )


def _count(
    runner: StageRunner, request: int, result: BackwardResult, wire: memoryview | None
) -> None:
    """Count the microbatch, also where the gradients of the weights are left for later."""
    runner.transcribe(request, result, wire)
    if result.owed is not None:
        runner.count_weights(request)


def _apply(runners: Sequence[StageRunner], steps: Sequence[StepRunner], step: Step) -> None:
    manifest = runners[0].manifest
    flats = [runner.accumulator.totals() for runner in runners]
    tokens = manifest.tokens_per_microbatch * len(runners[0].accumulator.contents.microbatches())
    norms = [
        one.norm(step, tokens, flat).own_squared for one, flat in zip(steps, flats, strict=True)
    ]
    rate = learning_rate(manifest.optimizer, manifest.training.steps, step)
    for one, flat in zip(steps, flats, strict=True):
        one.apply(step, tokens, math.sqrt(math.fsum(norms)), rate, flat)
