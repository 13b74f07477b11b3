"""The optimizer step and the fingerprint of its result.

Owns AdamW (Loshchilov & Hutter, arXiv 1711.05101) as the manifest configures it, and the digest
by which replicas are compared. The rate and the clip factor come from `swarm_shared.run.schedule`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_shared.model.flat_gradients import FlatLayout, squared_norm
from swarm_shared.model.host_copies import HostCopies
from swarm_shared.model.llama import Stage
from swarm_shared.model.portable_adamw import AdamWStep, AdamWVectors, take_step
from swarm_shared.run.manifest import OptimizerConfig

_WINDOW_ELEMENTS = 1 << 18
_GOLDEN = -7046029254386353131
"""0x9E3779B97F4A7C15 as a signed integer: an odd multiplier that spreads positions."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A digest of a stage's whole state and a norm of its parameters.

    `digest` is equal if and (practically) only if all parameters, and AdamW's moments and steps
    where they were given, are equal to the bit; `norm` lets unlike devices be compared within a
    tolerance.
    """

    digest: str
    norm: float


@dataclass(slots=True)
class AdamW:
    """The state of AdamW over a stage's parameters, in the stage's order, in host memory.

    The step is computed on the host wherever the parameters are: an accelerator needs no memory for
    moments and mean gradient (12 bytes a parameter), and replicas on unlike devices end a step with
    equal parameters. (The idea is ZeRO-Offload's, Ren et al. 2021, arXiv 2101.06840, section 4.)

    `swarm_shared.model.portable_adamw` takes it, with the same bits for any number of threads and
    on any processor, which replicas depend on.
    """

    config: OptimizerConfig
    parameters: list[Tensor]
    first_moments: list[Tensor]
    second_moments: list[Tensor]
    steps: list[Tensor]
    """Number of steps taken, once per parameter; all are equal."""

    def set_steps(self, count: int) -> None:
        for step in self.steps:
            step.fill_(float(count))

    def step(self, gradients: list[Tensor], learning_rate: float) -> None:
        """Take one step with gradients in host memory; weight decay applies to matrices only."""
        for step in self.steps:
            step.add_(1.0)
        copies, number = HostCopies(self.parameters), int(self.steps[0].item())
        decayed, other = (
            AdamWStep.of(self.config, learning_rate, number, decays=decays)
            for decays in (True, False)
        )
        for chosen in self._taken_together():
            weights = [copies.of(self.parameters[i].detach()) for i in chosen]
            work = [
                (decayed if weight.ndim >= 2 else other, self._vectors(i, weight, gradients[i]))
                for i, weight in zip(chosen, weights, strict=True)
            ]
            take_step(work, torch.get_num_threads())
            for i, weight in zip(chosen, weights, strict=True):
                if self.parameters[i].device != weight.device:
                    self.parameters[i].detach().copy_(weight)

    def _vectors(self, i: int, weight: Tensor, gradient: Tensor) -> AdamWVectors:
        """The memory of one parameter's weight, gradient and moments, which are in host memory."""
        tensors = (weight, gradient, self.first_moments[i], self.second_moments[i])
        return AdamWVectors(*(tensor.view(-1).numpy() for tensor in tensors))

    def _taken_together(self) -> Iterator[list[int]]:
        """Numbers of the parameters that step together: those of another device one at a time, so
        that the host has one copy at a time."""
        on_host = [i for i, p in enumerate(self.parameters) if p.device.type == "cpu"]
        if on_host:
            yield on_host
        yield from ([i] for i in range(len(self.parameters)) if i not in on_host)


def make_optimizer(stage: Stage, config: OptimizerConfig) -> AdamW:
    """Return AdamW over all parameters, its state allocated at once: a stage at version 0 downloads
    and checkpoints like any other."""
    parameters: list[Tensor] = [parameter for _, parameter in stage.all_parameters()]
    return AdamW(
        config,
        parameters,
        [torch.zeros(p.shape) for p in parameters],
        [torch.zeros(p.shape) for p in parameters],
        [torch.zeros(()) for _ in parameters],
    )


def apply_step(
    optimizer: AdamW,
    layout: FlatLayout,
    flat_mean_gradient: Tensor,
    learning_rate: float,
    clip_factor: float,
) -> None:
    """Take one AdamW step with the clipped mean gradient (per token).

    `flat_mean_gradient` lies in host memory and is scaled in place; the parameters' own `.grad` is
    neither used nor changed.
    """
    if clip_factor != 1.0:
        flat_mean_gradient.mul_(clip_factor)
    with torch.no_grad():
        optimizer.step(list(layout.views(flat_mean_gradient)), learning_rate)


def fingerprint(stage: Stage, optimizer: AdamW | None = None) -> Fingerprint:
    """Return the digest of all parameters, moments and steps, and the norm of the parameters.

    Per tensor: two sums of the bit patterns as integers, one plain and one weighted by position,
    modulo 2^64; exact, so no order of summation matters. It detects accidents, not malice: sums can
    be forged. All of it is computed on the host, where the moments are: not all accelerators have
    float64, or sum int64 modulo 2^64. There is one copy of one parameter at a time.
    """
    named = list(stage.all_parameters())
    tensors: list[tuple[str, Tensor]] = [(name, parameter) for name, parameter in named]
    if optimizer is not None:
        state = (optimizer.first_moments, optimizer.second_moments, optimizer.steps)
        for (name, _), *of_one in zip(named, *state, strict=True):
            tensors += [(f"{kind}.{name}", t) for kind, t in zip("mvt", of_one, strict=True)]
    weights, squares, lines = _position_weights(), list[float](), list[str]()
    copies = HostCopies([parameter for _, parameter in named])
    for number, (name, tensor) in enumerate(tensors):
        flat = copies.of(tensor.detach()).view(-1)
        plain, weighted = _bit_sums(flat, weights).tolist()
        lines.append(f"{name}:{tuple(tensor.shape)}={plain},{weighted}")
        if number < len(named):
            squares.append(squared_norm(flat))
    text = ";".join(lines)
    norm = math.sqrt(math.fsum(squares))
    return Fingerprint(hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), norm)


def _position_weights() -> Tensor:
    """Return one odd integer per position of a window, irregular enough that no simple edit
    cancels."""
    weights = torch.arange(_WINDOW_ELEMENTS, dtype=torch.int64)
    weights.mul_(_GOLDEN)
    weights ^= weights >> 29
    return weights.mul_(_GOLDEN).bitwise_or_(1)


def _bit_sums(flat: Tensor, weights: Tensor) -> Tensor:
    totals = torch.zeros(2, dtype=torch.int64)
    for index, window in enumerate(torch.split(flat.view(torch.int32), _WINDOW_ELEMENTS)):
        bits = window.to(torch.int64)
        totals[0] += bits.sum()
        totals[1] += (bits * weights[: bits.numel()]).sum() * (2 * index + 1)
    return totals
