"""One middle stage run by the worker's own code, with payloads and outputs in slots.

Without daemon and network: the benchmark covers the worker's code between two messages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import torch

from benchmarks.counts.world import manifest as any_manifest
from swarm_client.stage.worker.accelerator import Accelerator
from swarm_client.stage.worker.flights import CountedWeights
from swarm_client.stage.worker.stage_runner import ForwardResult, StageRunner
from swarm_client.stage.worker.step_runner import StepRunner
from swarm_shared.base.memory import StageMemory
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step
from swarm_shared.run.manifest import Manifest, StageRange
from swarm_shared.run.model_config import ComputeDtype, ModelConfig, Preset
from swarm_shared.run.stage_cut import ModelProfile, stage_memory

MIDDLE = StageIndex(1)


@dataclass(frozen=True, slots=True)
class Timed:
    """Times of `microbatches` and one optimizer step."""

    microbatches: int
    seconds: float
    optimizer_seconds: float


def largest_inner_stage(preset: Preset) -> int:
    """Return the number of layers of the largest stage between the preset's first and last."""
    return -(-preset.model.layers // preset.stages)


def layers_memory(profile: ModelProfile, layers: int) -> StageMemory:
    """Return the memory of a middle stage of so many layers."""
    cut = StageRange(first_layer=0, end_layer=layers)
    return stage_memory(profile, cut, False, False, exact=True)


def stage_manifest(preset: Preset, layers: int, dtype: ComputeDtype) -> Manifest:
    """Return a run whose middle stage has `layers` layers; its other stages are never built."""
    base = any_manifest()
    model: ModelConfig = preset.model.model_copy(update={"layers": layers + 2})
    bounds = (0, 1, 1 + layers, 2 + layers)
    cuts = tuple(StageRange(first_layer=begin, end_layer=end) for begin, end in pairwise(bounds))
    training = base.training.model_copy(
        update={"sequences_per_microbatch": preset.sequences_per_microbatch, "dtype": dtype}
    )
    return base.model_copy(update={"model": model, "training": training, "stages": cuts})


def random_payload(runner: StageRunner) -> memoryview:
    """Return the payload that a daemon would have written: the same for inputs and gradients."""
    dtype = runner.stage.compute_dtype
    payload = memoryview(bytearray(runner.sizes.input_bytes))
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(len(payload) // dtype.itemsize, generator=generator)
    torch.frombuffer(payload, dtype=dtype).copy_(drawn)
    return payload


class StageAtWork:
    """A stage with its worker, built once per configuration; `measure` may be called repeatedly."""

    def __init__(self, manifest: Manifest, accelerator: Accelerator, backend: str | None) -> None:
        self._manifest = manifest
        self._accelerator = accelerator
        self._runner = StageRunner(manifest, MIDDLE, accelerator, 2**62, 0, backend)
        self._steps = StepRunner(self._runner)
        self._step = 0
        self._counted: CountedWeights | None = None
        self._payload = random_payload(self._runner)
        self._slot = memoryview(bytearray(self._runner.sizes.slot_bytes))
        self._gradients = torch.zeros(self._runner.layout.count)

    @property
    def parameters(self) -> int:
        return self._runner.layout.count

    def measure(self, microbatches: int) -> Timed:
        """Run one step of `microbatches`: forward, backward, and the optimizer."""
        self._step += 1
        self._wait()
        began = time.perf_counter()
        for index in range(microbatches):
            self._microbatch(index)
        self._wait()
        computed = time.perf_counter()
        step, tokens = Step(self._step), microbatches * self._manifest.tokens_per_microbatch
        self._steps.prepare_round(step, self._gradients)
        self._steps.apply(step, tokens, 1.0, 1e-4, self._gradients)
        self._wait()
        ended = time.perf_counter()
        return Timed(microbatches, computed - began, ended - computed)

    def _microbatch(self, index: int) -> None:
        number, step = self._number(index), Step(self._step)
        if self._runner.copies_while_computing:  # as the worker's loop does
            self._runner.while_computing = lambda: self._runner.prefetch(
                self._number(index + 1), self._payload
            )
        forward = self._runner.forward(number, step, MicrobatchIndex(index), True, self._payload)
        assert isinstance(forward, ForwardResult)
        self._runner.output_sent(number, self._answer(forward.output))
        backward = self._runner.backward(number, self._payload)
        assert backward.input_gradient is not None
        wire = self._answer(backward.input_gradient)
        self._runner.transcribe(number, backward, wire)
        if backward.owed is not None:
            self._counted = self._runner.count_weights(number)

    def _number(self, index: int) -> int:
        """Return a request number that is unique across steps."""
        return self._step * 1_000_000 + index

    def _answer(self, tensor: torch.Tensor) -> memoryview:
        host = self._runner.copier.to_host(tensor)
        return self._slot[: self._runner.codec.write_output(host, self._slot)]

    def _wait(self) -> None:
        if self._counted is not None:
            self._counted.transcript()
        self._accelerator.synchronise()
