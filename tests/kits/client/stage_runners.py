"""The stages of a small run in this process, and a microbatch's way through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from kits.client.shared_machine import SharedMachine
from kits.manifests import equal_stages, manifest_of
from swarm_client.stage.protocol.errors import RequestFailed
from swarm_client.stage.worker.stage_runner import BackwardResult, ForwardResult, StageRunner
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step
from swarm_shared.run.manifest import CodecsConfig, Manifest

PLENTY = 2**30
STEP = Step(1)
CPU = SharedMachine()


def make_manifest(
    stages: int = 2, dtype: str = "float32", tied: bool = False, layers: int = 3, **blocks: Any
) -> Manifest:
    return manifest_of(
        model={
            "vocabulary_size": 64, "hidden_size": 32, "intermediate_size": 48, "layers": layers,
            "heads": 4, "key_value_heads": 2, "sequence_length": 16, "tie_embeddings": tied,
            **blocks,
        },
        stages=equal_stages(layers, stages),
        training={"dtype": dtype},
        optimizer={"learning_rate": 1e-2, "warmup_steps": 0},
    )  # fmt: skip


def with_codecs(manifest: Manifest, activation: str, gradient: str) -> Manifest:
    codecs = CodecsConfig.model_validate({"activation": activation, "gradient": gradient})
    return manifest.model_copy(update={"codecs": codecs})


def tokens_of(manifest: Manifest, microbatch: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, both (B, T), made from the microbatch's number."""
    shape = (manifest.training.sequences_per_microbatch, manifest.model.sequence_length + 1)
    samples = np.random.default_rng(microbatch).integers(0, 64, shape, dtype=np.uint32)
    return samples[:, :-1].copy(), samples[:, 1:].copy()


def wire(*tensors: np.ndarray | torch.Tensor) -> memoryview:
    """Payload bytes, writable as slots are."""
    parts = []
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            parts.append(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            parts.append(tensor.tobytes())
    return memoryview(bytearray(b"".join(parts)))


def runners_of(
    manifest: Manifest, graph_budget: int = PLENTY, kept_budget: int = PLENTY
) -> list[StageRunner]:
    return [
        StageRunner(manifest, StageIndex(index), CPU, graph_budget, kept_budget)
        for index in range(manifest.stage_count)
    ]


@dataclass(frozen=True)
class Passed:
    """What the stages made of one microbatch, and what crossed the borders between them."""

    loss_sum: float
    input_gradients: list[torch.Tensor | None]
    answered: list[Transcript | None]
    added: list[bool]
    activations: list[bytes]
    gradients: list[bytes]

    def transcripts(self) -> list[Transcript]:
        assert all(self.answered)
        return [one for one in self.answered if one is not None]


def through(
    runners: Sequence[StageRunner], microbatch: int, *, request: int = 0, accumulate: bool = True,
    tokens_as: int | None = None,
) -> Passed:  # fmt: skip
    """One microbatch through all stages and back; each answer lies in the slot of its request, as
    in the worker's loop.

    `tokens_as`: number of the microbatch whose token ids are sent instead.
    """
    number, index = request or microbatch + 1, MicrobatchIndex(microbatch)
    inputs, targets = tokens_of(runners[0].manifest, microbatch if tokens_as is None else tokens_as)
    activations: list[bytes] = []
    payload = inputs.tobytes()
    for runner in runners[:-1]:
        forward = runner.forward(number, STEP, index, accumulate, _in_slot(runner, payload))
        assert isinstance(forward, ForwardResult)
        sent = _written(runner, forward.output, runner.codec.write_output)
        runner.output_sent(number, sent)
        activations.append(payload := sent.tobytes())
    payload += targets.tobytes()
    result = runners[-1].forward(number, STEP, index, accumulate, _in_slot(runners[-1], payload))
    assert isinstance(result, BackwardResult)
    assert result.loss_sum is not None
    results, answered, gradients = [result], list[Transcript | None](), list[bytes]()
    for runner, below in zip(reversed(runners[1:]), reversed(runners[:-1]), strict=True):
        assert results[0].input_gradient is not None
        sent = _written(runner, results[0].input_gradient, runner.codec.write_input_gradient)
        answered.insert(0, runner.transcribe(number, results[0], sent))
        gradients.insert(0, sent.tobytes())
        results.insert(0, below.backward(number, _in_slot(below, gradients[0])))
    answered.insert(0, runners[0].transcribe(number, results[0], None))
    return Passed(
        result.loss_sum, [one.input_gradient for one in results], answered,
        [one.added for one in results], activations, gradients,
    )  # fmt: skip


def _in_slot(runner: StageRunner, payload: bytes) -> memoryview:
    slot = memoryview(bytearray(runner.sizes.slot_bytes))
    slot[: len(payload)] = payload
    return slot[: len(payload)]


def _written(
    runner: StageRunner, tensor: torch.Tensor, write: Callable[[torch.Tensor, memoryview], int]
) -> memoryview:
    slot = memoryview(bytearray(runner.sizes.slot_bytes))
    return slot[: write(tensor, slot)]


def accumulated_gradients(runner: StageRunner) -> dict[str, torch.Tensor]:
    views = runner.layout.views(runner.accumulator.totals())
    return {entry.name: view for entry, view in zip(runner.layout.entries, views, strict=True)}


def failure(call: Callable[..., object], *arguments: Any) -> str:
    """The code with which a worker refuses."""
    with pytest.raises(RequestFailed) as caught:
        call(*arguments)
    return caught.value.code
