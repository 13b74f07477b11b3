"""Which trainings the gate consists of: the methods compared, and the tuning of their rates.

Pure: a training is a value, and the search takes a function from a training to its loss.
What has a loss already costs nothing again, so an interrupted search is repeated from the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.loss.local_steps.training import LocalSteps, Moments

RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
"""Peak learning rates that are tried, each twice the one before."""
FIRST_RATE = 3
"""Position in RATES where a search begins: near the best one of synchronous training."""
TUNING_SEED = 1

NESTEROV = (0.9, 0.5)
"""Outer rate and momentum for few inner steps: a change is applied 1.8 times in the long run."""
DILOCO = (0.7, 0.9)
"""Those of DiLoCo (arXiv 2311.08105, section 3), for 500 inner steps: 7 times in the long run."""


_SYNCHRONOUSLY = LocalSteps()


@dataclass(frozen=True, slots=True)
class Method:
    """A way of training, without its learning rate and its seed."""

    batch: int = 1
    """Microbatches of a step over those of the base run; there are as many fewer steps."""
    local: LocalSteps = _SYNCHRONOUSLY


@dataclass(frozen=True, slots=True)
class Training:
    """Everything that distinguishes one training of the gate from another."""

    model: str
    method: Method
    learning_rate: float
    seed: int

    def settings(self) -> dict[str, Any]:
        """Return the entries that identify the training in the result file."""
        local = self.method.local
        return {
            "model": self.model,
            "batch": self.method.batch,
            "cohorts": local.cohorts,
            "inner_steps": local.inner_steps,
            "outer_rate": local.outer_rate,
            "outer_momentum": local.outer_momentum,
            "moments": local.moments,
            "learning_rate": self.learning_rate,
            "seed": self.seed,
        }


def training_of(row: Mapping[str, Any]) -> Training:
    """Return the training that a row of the result file is of."""
    local = LocalSteps(
        cohorts=row["cohorts"],
        inner_steps=row["inner_steps"],
        outer_rate=row["outer_rate"],
        outer_momentum=row["outer_momentum"],
        moments=row["moments"],
    )
    method = Method(batch=row["batch"], local=local)
    return Training(row["model"], method, row["learning_rate"], row["seed"])


SYNCHRONOUS = Method()
LARGER_BATCH = Method(batch=4)


def cohorts(
    inner_steps: int,
    outer: tuple[float, float] = (1.0, 0.0),
    moments: Moments = "kept",
    count: int = 4,
) -> Method:
    rate, momentum = outer
    return Method(local=LocalSteps(count, inner_steps, rate, momentum, moments))


METHODS = (
    (
        SYNCHRONOUS,
        LARGER_BATCH,
        cohorts(10, moments="reset"),
        cohorts(10, NESTEROV, "reset"),
        cohorts(30, moments="reset"),
        cohorts(30, NESTEROV, "reset"),
        cohorts(10),
        cohorts(10, NESTEROV),
    ),
    (
        cohorts(1),
        cohorts(5, moments="reset"),
        cohorts(5, NESTEROV, "reset"),
        cohorts(30),
        cohorts(30, NESTEROV),
        # The bytes of ten inner steps, without any.
        Method(batch=10),
        # The outer momentum alone, without local steps.
        cohorts(10, NESTEROV, count=1),
    ),
    (
        cohorts(5),
        cohorts(5, NESTEROV),
        cohorts(1, NESTEROV),
        cohorts(30, DILOCO, "reset"),
        cohorts(30, DILOCO),
        cohorts(10, DILOCO, "reset"),
        cohorts(10, NESTEROV, "reset", count=2),
    ),
)
"""In groups that are computed one after the other: what decides comes first. Moments reset at every
step would leave AdamW only the signs of gradients, so that there is no such method with one inner
step."""

LARGER_MODEL_METHODS = (
    (SYNCHRONOUS, LARGER_BATCH, cohorts(10, NESTEROV, "reset"), cohorts(30, NESTEROV, "reset")),
    (
        cohorts(10, moments="reset"),
        cohorts(5, NESTEROV, "reset"),
        cohorts(10, NESTEROV, "reset", count=2),
        Method(batch=10),
    ),
)


def tuned_rate(loss: Callable[[float], float]) -> float:
    """Return the rate with the least loss, by steps from FIRST_RATE until both neighbours are
    worse. A training that diverges has an infinite loss."""
    losses: dict[int, float] = {}

    def at(position: int) -> float:
        if not 0 <= position < len(RATES):
            return math.inf
        if position not in losses:
            losses[position] = loss(RATES[position])
        return losses[position]

    best = FIRST_RATE
    while True:
        if at(best - 1) < at(best) or (best > 0 and at(best) == math.inf):
            best -= 1
        elif at(best + 1) < at(best):
            best += 1
        else:
            return RATES[best]


def train_all(
    model: str,
    groups: Sequence[Sequence[Method]],
    seeds: range,
    loss: Callable[[Training], float],
) -> None:
    """Tune the methods of a group with one seed, then train them with the others at their best
    rates, then do the next group. Each method is trained at the first rate before any is tuned, so
    that an interrupted search has something of all."""
    for methods in groups:
        for method in methods:
            loss(Training(model, method, RATES[FIRST_RATE], TUNING_SEED))
        tuned = []
        for method in methods:
            rate = _rate_of(model, method, loss)
            tuned.append(Training(model, method, rate, TUNING_SEED))
        for seed in seeds:
            for one in tuned:
                loss(replace(one, seed=seed))


def _rate_of(model: str, method: Method, loss: Callable[[Training], float]) -> float:
    return tuned_rate(lambda rate: loss(Training(model, method, rate, TUNING_SEED)))
