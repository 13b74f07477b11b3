"""The reference: the same run in one plain torch process, with which a swarm's losses are compared.

Owns the single-process training loop and the evaluation. Imports only the model, its schedule and
the codecs, no networking and no state machine, so that agreement with the swarm is meaningful.
At every stage boundary of the manifest, activations and gradients pass the run's codecs as on the
wire: what a lossy codec loses is part of what the run computes. With staleness 1 a second model
holds the previous version, and gradients are taken there.

Shape suffixes: B sequences, T positions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from swarm_coordinator.offline.merged_stages import merge_stages
from swarm_coordinator.offline.reference_gradients import ExactSums, PlainSums, step_sums
from swarm_shared.base.clock import monotonic
from swarm_shared.base.errors import UsageError
from swarm_shared.codecs.boundary import stage_boundary
from swarm_shared.model.flat_gradients import FlatLayout
from swarm_shared.model.initialise import build_whole
from swarm_shared.model.llama import Stage
from swarm_shared.model.optimizer import AdamW, apply_step, make_optimizer
from swarm_shared.model.repeatable_kernels import repeat_to_the_bit
from swarm_shared.model.state import load_frozen, load_parameters
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.schedule import clip_factor, learning_rate

Tokens = npt.NDArray[np.integer[Any]]
Microbatch = tuple[Tokens, Tokens]
"""(inputs_BT, targets_BT)."""
PROCESSOR = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Result of one training step."""

    step: int
    loss: float
    """Mean cross entropy of the step's tokens in nats, before the update, with the parameters at
    which the gradient is taken."""
    tokens: int
    seconds: float


def train_reference(
    manifest: Manifest,
    samples: Callable[[int], Sequence[Microbatch]],
    steps: int,
    on_step: Callable[[StepRecord], None],
    threads: int | None = None,
    initial: Sequence[Path] = (),
    device: torch.device = PROCESSOR,
) -> Stage:
    """Train the whole model from version 0 for `steps` steps and return it, on the processor.
    `initial`: the files of the manifest's initial states, one a stage.

    Microbatches are computed on `device`. Parameters, sums and the optimizer are the processor's,
    as in a swarm.

    `samples(step)` returns the microbatches of a step. The learning rate follows the manifest's
    number of steps, so that fewer `steps` are a prefix of the run.
    """
    with compute_threads(threads):
        stage = build_whole(manifest)
        if initial:
            load_given_model(stage, manifest, initial)
        insert_boundary_codecs(stage, manifest)
        optimizer = make_optimizer(stage, manifest.optimizer)
        computing = stage
        if manifest.training.staleness or device != PROCESSOR:
            computing = build_whole(manifest, device)
            computing.load_state_dict(stage.state_dict())
            insert_boundary_codecs(computing, manifest)
        layout = FlatLayout.of(stage)
        sums = step_sums(computing, layout, manifest)
        for step in range(1, steps + 1):
            started = monotonic()
            loss_sum, tokens = accumulate(computing, samples(step), sums)
            gradient, norm = sums.take(tokens)
            if manifest.training.staleness:
                computing.load_state_dict(stage.state_dict())  # before this step is applied
            apply_gradient(manifest, step, optimizer, layout, gradient, norm)
            if computing is not stage and not manifest.training.staleness:
                computing.load_state_dict(stage.state_dict())
            on_step(StepRecord(step, loss_sum / tokens, tokens, monotonic() - started))
        return stage


def usable_device(name: str) -> torch.device:
    """Return a device by its name in torch's spelling, prepared to compute what repeats. UsageError
    where torch cannot compute on it."""
    try:
        device = torch.device(name)
        torch.ones(1, device=device).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(
            f"torch cannot compute on a device {name!r} here; give cpu, or cuda:0 where there is a "
            "GPU and a torch that is built for it"
        ) from error
    repeat_to_the_bit(device)
    return device


def load_given_model(stage: Stage, manifest: Manifest, initial: Sequence[Path]) -> None:
    """Load the model from which the run continues into the uncut model; where there are adapters,
    it is what is frozen."""
    load = load_frozen if manifest.model.has_adapters else load_parameters
    load(stage, merge_stages(manifest.model.base, initial))


def insert_boundary_codecs(stage: Stage, manifest: Manifest) -> None:
    """Apply the manifest's codecs to activations and gradients at every stage boundary."""
    codecs = manifest.codecs
    if codecs.activation == codecs.gradient == "none":
        return
    cross = stage_boundary(codecs.activation, codecs.gradient)

    def enter(_: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x_BTD, *rest = arguments
        return (cross(x_BTD), *rest)

    for cut in manifest.stages[1:]:
        first = _first_module(stage, cut.first_layer)
        first.register_forward_pre_hook(enter)


def _first_module(stage: Stage, layer: int) -> torch.nn.Module:
    """Return the first module of a stage that begins with this layer."""
    layers, norm, widen = stage.model.layers, stage.model.norm, stage.model.widen
    if str(layer) in widen:
        return widen[str(layer)]
    # The last stage may have no layer; it then begins with the norm.
    first = layers[str(layer)] if layer < len(layers) else norm
    assert first is not None, "the whole model has a norm"
    return first


def evaluate(stage: Stage, microbatches: Sequence[Microbatch]) -> float:
    """Return the mean cross entropy per token in nats, without training."""
    loss_sum, tokens = 0.0, 0
    with torch.no_grad():
        for microbatch in microbatches:
            inputs_BT, targets_BT = on_device(microbatch, stage.device)
            loss_sum += float(stage(inputs_BT, targets_BT))
            tokens += targets_BT.numel()
    return loss_sum / tokens


def accumulate(
    stage: Stage, microbatches: Sequence[Microbatch], sums: PlainSums | ExactSums
) -> tuple[float, int]:
    """Add the gradients of all microbatches; return the sum of losses and the number of tokens."""
    losses: list[float] = []
    tokens = 0
    for microbatch in microbatches:
        inputs_BT, targets_BT = on_device(microbatch, stage.device)
        loss = stage(inputs_BT, targets_BT)
        sums.add(loss)
        losses.append(float(loss.detach()))
        tokens += targets_BT.numel()
    return math.fsum(losses), tokens


def on_device(
    microbatch: Microbatch, device: torch.device = PROCESSOR
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a microbatch as tensors, as a stage takes them."""
    inputs_BT, targets_BT = (
        torch.from_numpy(np.ascontiguousarray(part, dtype=np.int64)) for part in microbatch
    )
    return inputs_BT.to(device), targets_BT.to(device)


def apply_gradient(
    manifest: Manifest,
    step: int,
    optimizer: AdamW,
    layout: FlatLayout,
    gradient: torch.Tensor,
    norm: float,
) -> None:
    """Take the optimizer step `step` with its mean gradient and the gradient's norm."""
    apply_step(
        optimizer,
        layout,
        gradient,
        learning_rate(manifest.optimizer, manifest.training.steps, step),
        clip_factor(norm, manifest.optimizer.clip_norm),
    )


@contextlib.contextmanager
def compute_threads(threads: int | None) -> Iterator[None]:
    """Let torch compute with so many threads, within; None: with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if threads is None else threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
