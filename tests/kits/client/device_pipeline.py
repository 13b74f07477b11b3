"""The stages of a run on one kind of device, trained step by step; what they compute can be
compared with the same on another kind."""

from __future__ import annotations

from typing import Any

import torch

from kits.client.stage_runners import PLENTY, make_manifest, tokens_of
from swarm_client.stage.worker.accelerator import Accelerator
from swarm_client.stage.worker.stage_runner import BackwardResult, ForwardResult, StageRunner
from swarm_client.stage.worker.step_runner import StepRunner
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step
from swarm_shared.model import global_norm
from swarm_shared.run.manifest import CodecsConfig, Manifest
from swarm_shared.run.schedule import learning_rate

MICROBATCHES = 2


def comparable(manifest: Manifest) -> Manifest:
    """A run whose attention is computed by one kernel on all devices: of grouped heads, whose
    gradients a fused kernel of the processor's adds in an order of its own, there is none."""
    model = manifest.model.model_copy(update={"key_value_heads": manifest.model.heads})
    codecs = CodecsConfig(average="exact")
    return manifest.model_copy(update={"model": model, "codecs": codecs})


MANIFEST = comparable(make_manifest(3))


class Pipeline:
    """All stages of a run on one kind of device, and what they have computed."""

    def __init__(
        self, manifest: Manifest, accelerator: Accelerator, graph_budget: int,
        streamed_bytes: int = 0, host_graph_bytes: int = 0,
    ) -> None:  # fmt: skip
        self._manifest = manifest
        self.runners = [
            StageRunner(
                manifest,
                StageIndex(i),
                accelerator,
                graph_budget,
                PLENTY,
                streamed_bytes=streamed_bytes,
                host_graph_bytes=host_graph_bytes,
            )
            for i in range(manifest.stage_count)
        ]
        self.steps = [StepRunner(runner) for runner in self.runners]
        self.losses: list[float] = []
        self._requests = 0

    def train(self, steps: int) -> tuple[list[float], list[list[str]]]:
        """The losses, and what `step` returns of the first steps of the run."""
        found = [self.step(Step(step)) for step in range(1, steps + 1)]
        return self.losses, found

    def step(self, step: Step) -> list[str]:
        """Train one step, with one microbatch taken out and computed again; the digests of the
        parameters, and the transcripts of all that was counted."""
        for number in range(MICROBATCHES):
            self.microbatch(step, MicrobatchIndex(number))
        middle = self.runners[0]
        assert middle.uncommit(step, (MicrobatchIndex(0),))
        self.microbatch(step, MicrobatchIndex(0))
        return [*self._transcripts(), *self._close(step)]

    def _transcripts(self) -> list[str]:
        found: list[str] = []
        for runner in self.runners:
            runner.finish_hashing()
            in_sums = runner.accumulator.transcripts
            found += [in_sums[MicrobatchIndex(i)].model_dump_json() for i in range(MICROBATCHES)]
        return found

    def microbatch(self, step: Step, index: MicrobatchIndex) -> None:
        inputs, targets = tokens_of(self._manifest, index)
        self._requests += 1
        payload = memoryview(bytearray(inputs.tobytes()))
        results: list[tuple[StageRunner, BackwardResult]] = []
        for runner in self.runners:
            if runner.stage.is_last:
                payload = memoryview(bytearray(bytes(payload) + targets.tobytes()))
            if runner.copies_while_computing:
                runner.prefetch(self._requests, payload)
            result = runner.forward(self._requests, step, index, True, payload)
            if isinstance(result, ForwardResult):
                host = runner.copier.to_host(result.output)
                payload = _sent(runner.codec.write_output, host)
                runner.output_sent(self._requests, payload)
            else:
                assert result.loss_sum is not None
                self.losses.append(result.loss_sum)
                results.append((runner, result))
        for runner in (None, *reversed(self.runners[:-1])):
            if runner is not None:
                result = runner.backward(self._requests, payload)
                results.append((runner, result))
            owner, result = results[-1]
            wire = None
            if result.input_gradient is not None:
                host = owner.copier.to_host(result.input_gradient)
                payload = wire = _sent(owner.codec.write_input_gradient, host)
            owner.transcribe(self._requests, result, wire)
            if result.owed is not None:
                owner.count_weights(self._requests)

    def _close(self, step: Step) -> list[str]:
        tokens = MICROBATCHES * self._manifest.tokens_per_microbatch
        flats = [runner.accumulator.totals() for runner in self.runners]
        norms = [s.norm(step, tokens, flat) for s, flat in zip(self.steps, flats, strict=True)]
        norm = global_norm([one.own_squared for one in norms])
        rate = learning_rate(self._manifest.optimizer, self._manifest.training.steps, step)
        return [
            steps.apply(step, tokens, norm, rate, flat).digest
            for steps, flat in zip(self.steps, flats, strict=True)
        ]


def _sent(write: Any, tensor: torch.Tensor) -> memoryview:
    slot = memoryview(bytearray(tensor.nbytes + 4096))
    return slot[: write(tensor, slot)]
