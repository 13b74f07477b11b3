"""The numbers of the simulated swarm: manifest, losses, norms, and the kinds of faults.

Values are made up but fixed, so that every sum the coordinator reports can be checked.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from benchmarks.simulator.swarm_rule import choose_swarm_moves
from kits import manifests
from kits.members import peer_record
from kits.memory import takes
from kits.swarm_world.sums import SumLie
from swarm_coordinator.core.state.moves import RebalancingRule, RebalancingSettings
from swarm_shared.run.manifest import (
    Manifest,
    StageRange,
)
from swarm_shared.scheduling.placement import MovePolicy

Cell = tuple[int, int]
"""(stage, microbatch) of a gradient, or (step, microbatch) within a stage."""

Params = tuple[tuple[int, int], ...]
"""The (step, attempt) pairs that were applied to a stage."""

TOKENS = 4
"""Tokens of a microbatch."""

COORDINATOR = peer_record("coordinator", microbatches_per_second=0.0)


CERTIFICATE_SECONDS = 40.0
"""Seconds for which members must be notified of a revoked peer."""


class Violation(AssertionError):
    """A violated invariant."""


class Moves(StrEnum):
    """The rule by which peers move: none, the coordinator's, or SWARM's, which moves more."""

    NONE = "none"
    THROUGHPUT = "throughput"
    SWARM = "swarm"


@dataclass(frozen=True)
class Options:
    stages: int = 2
    peers: int = 4
    microbatches: int = 4
    steps: int = 3
    checkpoint_steps: int = 2
    evaluation: int = 2
    tied: bool = False
    starting: int = 1
    staleness: Literal[0, 1] = 0
    audit_share: float = 0.0
    """Share of the cells that are audited."""
    rolls_back: bool = False
    """Whether a late verdict takes the run back; then every checkpoint is kept."""
    liars: int = 0
    """Number of peers that count gradients other than they should, and state wrong audits."""
    check_sums: bool = False
    """Whether averages are exact, and checked."""
    hidden_only: bool = False
    """Whether cells are audited only with all others of their member."""
    alike: bool = False
    """Whether all machines compute alike, to the bit, although cells are audited."""
    large_gradients: int = 0
    """Number of microbatches of a step whose gradient is much larger than those of the others."""
    sum_lies: tuple[SumLie, ...] = ()
    """What the first peers do in averages."""
    moves: Moves = Moves.NONE
    """If set, peers differ in speed, some cannot hold two stages, and every gain is worth a
    move."""


@dataclass(frozen=True)
class Fault:
    """After `wait` seconds, `kind` happens to the `target`th of the peers that it can happen to."""

    wait: float
    kind: str
    target: int = 0
    seconds: float = 3.0


def manifest_of(options: Options) -> Manifest:
    return manifests.manifest_of(
        name="sim",
        organiser="coordinator",
        model={
            "vocabulary_size": 16, "layers": options.stages, "sequence_length": 2,
            "tie_embeddings": options.tied,
        },
        stages=tuple(
            StageRange(first_layer=i, end_layer=i + 1, memory=takes(100), work_flops=1.0)
            for i in range(options.stages)
        ),
        training={
            "steps": options.steps, "microbatches_per_step": options.microbatches, "seed": 0,
            "evaluation_microbatches": options.evaluation, "staleness": options.staleness,
        },
        limits={
            "join_hold_seconds": 5.0, "round_stall_seconds": 3.0, "lease_seconds": 20.0,
            "starting_peers_per_stage": options.starting,
        },
        codecs={"average": "exact" if options.check_sums else "none"},
        checkpoint_steps=options.checkpoint_steps,
    )  # fmt: skip


def rebalancing_settings(options: Options) -> RebalancingSettings:
    policy = MovePolicy(period_seconds=1.0, margin=0.0, minimum_gain=0.0, rate_noise=0.0)
    if options.moves is Moves.SWARM:
        return RebalancingSettings(
            RebalancingRule.THROUGHPUT, policy, loss_reaction_seconds=math.inf,
            choose=choose_swarm_moves,
        )  # fmt: skip
    return RebalancingSettings(RebalancingRule(options.moves), policy)


def checkpoint_item(version: int, stage: int) -> str:
    return f"checkpoint/{version}/{stage}"


def sha_of(params: tuple[object, ...], stage: int) -> str:
    return hashlib.sha256(repr((stage, params)).encode()).hexdigest()


def train_loss(step: int, microbatch: int) -> float:
    return 4 * (5.0 - 0.01 * step) + 0.1 * microbatch


def own_squared(step: int, stage: int) -> float:
    return 1.0 + 0.1 * step + 0.01 * stage


def tied_squared(step: int) -> float:
    return 0.5 + 0.2 * step
