"""Training with local steps in one process: what a swarm of cohorts would compute.

Owns the rounds and the outer step. Everything within a cohort is the reference's
(`swarm_coordinator.offline.reference`): sums, norm, clipping, AdamW, schedule.

A round begins at the boundary parameters. Each cohort takes `inner_steps` optimizer steps of its
own from there, with its own microbatches of each step; then the mean of the cohorts' changes is the
gradient of one outer step, which gives the next boundary (DiLoCo, Douillard et al. 2023, arXiv
2311.08105, algorithm 1; with plain averaging local SGD, Stich 2018, arXiv 1805.09767).

One cohort with one inner step and plain averaging is synchronous training, to the bit. Several
cohorts with one inner step are not: each clips and normalises its own gradient, and averages
follow AdamW instead of preceding it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from swarm_coordinator.offline.reference import (
    Microbatch,
    StepRecord,
    accumulate,
    apply_gradient,
    compute_threads,
    insert_boundary_codecs,
)
from swarm_coordinator.offline.reference_gradients import ExactSums, PlainSums, step_sums
from swarm_shared.base.clock import monotonic
from swarm_shared.model.flat_gradients import FlatLayout
from swarm_shared.model.initialise import build_whole
from swarm_shared.model.llama import Stage
from swarm_shared.model.optimizer import AdamW, make_optimizer
from swarm_shared.run.manifest import Manifest

Moments = Literal["kept", "reset"]
"""What becomes of AdamW's moments and its step count at a boundary; kept ones are each cohort's."""


@dataclass(frozen=True, slots=True)
class LocalSteps:
    """How the steps of a run are divided; the defaults are synchronous training."""

    cohorts: int = 1
    inner_steps: int = 1
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    """Nesterov's; rate 1 without momentum is plain averaging."""
    moments: Moments = "kept"


class Diverged(Exception):
    """A gradient is not finite."""


def cohort_microbatches(cohort: int, cohorts: int, microbatches: int) -> range:
    """Return the indices of the microbatches of every step that belong to a cohort."""
    assert microbatches % cohorts == 0, "every cohort has as many microbatches"
    size = microbatches // cohorts
    return range(cohort * size, (cohort + 1) * size)


class OuterOptimizer:
    """SGD with Nesterov's momentum over whole models, as torch.optim.SGD computes it, in float64.

    Written with the mean of the cohorts' parameters as the starting point, so that plain averaging
    gives that mean without a rounding of the changes.
    """

    def __init__(self, rate: float, momentum: float) -> None:
        self._rate = rate
        self._momentum = momentum
        self._velocity: Tensor | None = None

    def step(self, boundary: Tensor, ends: Sequence[Tensor]) -> Tensor:
        """Return the next boundary from the last one and the parameters where cohorts ended, all of
        them flat float32 vectors."""
        mean = torch.stack(list(ends)).double().mean(0)
        gradient = boundary.double() - mean
        if self._velocity is None:
            self._velocity = torch.zeros_like(gradient)
        self._velocity.mul_(self._momentum).add_(gradient)
        # boundary - rate · (gradient + momentum · velocity)
        mean.add_(gradient, alpha=1.0 - self._rate)
        mean.add_(self._velocity, alpha=-self._rate * self._momentum)
        return mean.float()


def train_local_steps(
    manifest: Manifest,
    local: LocalSteps,
    microbatch: Callable[[int, int], Microbatch],
    on_step: Callable[[StepRecord], None],
) -> Stage:
    """Train the whole model for the manifest's steps and return it at the last boundary.

    `microbatch(step, index)` returns a microbatch of a step. The last round is shorter if the inner
    steps do not divide the steps. A record's loss is that of the cohorts' own parameters, and its
    seconds are the round's, divided by its steps. Diverged if a gradient is not finite.
    """
    assert manifest.training.staleness == 0, "local steps are defined for staleness 0"
    with compute_threads(1):
        stage = build_whole(manifest)
        insert_boundary_codecs(stage, manifest)
        cohorts = _Cohorts(manifest, local, microbatch, stage)
        outer = OuterOptimizer(local.outer_rate, local.outer_momentum)
        boundary = _parameters(stage)
        steps = manifest.training.steps
        for first in range(1, steps + 1, local.inner_steps):
            taken = range(first, min(first + local.inner_steps, steps + 1))
            started = monotonic()
            boundary = outer.step(boundary, cohorts.run_round(boundary, taken))
            seconds = (monotonic() - started) / len(taken)
            for step in taken:
                on_step(cohorts.record(step, seconds))
        _load(stage, cohorts.layout, boundary)
        return stage


class _Cohorts:
    """All cohorts, computed one after the other in the same model."""

    def __init__(
        self,
        manifest: Manifest,
        local: LocalSteps,
        microbatch: Callable[[int, int], Microbatch],
        stage: Stage,
    ) -> None:
        self.layout = FlatLayout.of(stage)
        self._manifest = manifest
        self._local = local
        self._microbatch = microbatch
        self._stage = stage
        self._sums: PlainSums | ExactSums = step_sums(stage, self.layout, manifest)
        self._optimizers = [make_optimizer(stage, manifest.optimizer) for _ in range(local.cohorts)]
        self._losses: dict[int, list[float]] = {}
        """Per step of the round, the sum of each cohort's losses."""

    def run_round(self, boundary: Tensor, steps: range) -> list[Tensor]:
        """Return each cohort's parameters after its inner steps."""
        self._losses = {step: [] for step in steps}
        ends = []
        for cohort, optimizer in enumerate(self._optimizers):
            _load(self._stage, self.layout, boundary)
            if self._local.moments == "reset":
                _reset(optimizer)
            for step in steps:
                self._inner_step(cohort, optimizer, step)
            ends.append(_parameters(self._stage))
        return ends

    def record(self, step: int, seconds: float) -> StepRecord:
        tokens = self._manifest.tokens_per_step
        return StepRecord(step, math.fsum(self._losses[step]) / tokens, tokens, seconds)

    def _inner_step(self, cohort: int, optimizer: AdamW, step: int) -> None:
        count = self._manifest.training.microbatches_per_step
        indices = cohort_microbatches(cohort, self._local.cohorts, count)
        microbatches = [self._microbatch(step, index) for index in indices]
        loss_sum, tokens = accumulate(self._stage, microbatches, self._sums)
        self._losses[step].append(loss_sum)
        gradient, norm = self._sums.take(tokens)
        if not math.isfinite(norm):
            raise Diverged
        apply_gradient(self._manifest, step, optimizer, self.layout, gradient, norm)


def _reset(optimizer: AdamW) -> None:
    for moment in (*optimizer.first_moments, *optimizer.second_moments):
        moment.zero_()
    optimizer.set_steps(0)


def _parameters(stage: Stage) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for _, parameter in stage.all_parameters()])


@torch.no_grad()
def _load(stage: Stage, layout: FlatLayout, flat: Tensor) -> None:
    for (_, parameter), values in zip(stage.all_parameters(), layout.views(flat), strict=True):
        parameter.copy_(values)
