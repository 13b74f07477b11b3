"""The size of a new run's microbatches, and of the queues that hold them. Pure functions.

A stage worker spends time on each microbatch that does not depend on its size. Small microbatches
fill and drain the pipeline sooner, large ones spend less on that overhead; the size is the smallest
at which the overhead is small (docs/decisions, number 0039). A size changes what the run computes
only by rounding: the sequences of a step stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swarm_shared.run.manifest import LimitsConfig

FLOPS_PER_SECOND = 1.6e11
"""Computing rate of the assumed machine: two processor cores, on which one torch process trains the
preset `small` at 987 tokens a second (docs/benchmarks.md)."""

SECONDS_PER_MICROBATCH = 0.46e-3
SECONDS_PER_LAYER = 1.17e-3
SECONDS_PER_PARAMETER = 2.95e-9
"""Time of a microbatch in a stage worker of the same machine, measured over loopback, that its
tokens do not explain: messages, the calls of each layer, and the count of every parameter's
gradient."""

LARGEST_OVERHEAD = 0.1
"""Overhead over the time of computing, at the slowest stage."""

PEERS_PER_STAGE = 4
"""Peers that a stage is assumed to get, unless the run starts with more."""

MICROBATCHES_PER_PEER = 2
"""Microbatches of a step for each peer of the pipeline: filling and draining a pipeline of n stages
takes as long as n - 1 of its 2n microbatches."""

HOP_SECONDS = 0.04
"""Time of a packet from one machine to another, over two home lines."""

MAX_QUEUE = 1024
"""The manifest's bound of `edge_credits`; that of `stage_queue` is larger."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """What a stage of the plan computes."""

    flops_per_sequence: float
    """Forward and backward."""
    layers: int
    parameters: int

    @property
    def overhead_seconds(self) -> float:
        """Seconds of a microbatch of any size on the assumed machine."""
        return (
            SECONDS_PER_MICROBATCH
            + SECONDS_PER_LAYER * self.layers
            + SECONDS_PER_PARAMETER * self.parameters
        )

    def task_seconds(self, sequences: int) -> float:
        """Seconds of a microbatch of so many sequences on the assumed machine."""
        return sequences * self.flops_per_sequence / FLOPS_PER_SECOND + self.overhead_seconds


def overhead(stages: Sequence[StageWork], sequences: int) -> float:
    """Return by how much the slowest stage is slower than without overhead: 0.1 if its task is ten
    times its overhead. It falls with the number of sequences."""
    computing = sequences * max(stage.flops_per_sequence for stage in stages) / FLOPS_PER_SECOND
    return max(stage.task_seconds(sequences) for stage in stages) / computing - 1


def least_microbatches(stages: int, starting_peers_per_stage: int) -> int:
    """Return the microbatches of a step that keep the assumed peers busy."""
    return MICROBATCHES_PER_PEER * max(PEERS_PER_STAGE, starting_peers_per_stage) * stages


def choose_sequences(
    stages: Sequence[StageWork],
    sequences_per_step: int,
    least: int,
    most: int,
) -> int:
    """Return the sequences per microbatch: the fewest with at most `LARGEST_OVERHEAD`, or as many
    as possible.

    They divide the step's sequences into at most `most` and at least `least` microbatches, or into
    as many as possible where there are too few sequences for that.
    """
    possible = [
        size
        for size in range(1, sequences_per_step + 1)
        if sequences_per_step % size == 0 and sequences_per_step // size <= most
    ]
    allowed = [size for size in possible if sequences_per_step // size >= least] or possible[:1]
    return next(
        (size for size in allowed if overhead(stages, size) <= LARGEST_OVERHEAD), allowed[-1]
    )


def choose_queue(
    task_seconds: Sequence[float],
    activation_seconds: float,
    gradient_seconds: float,
    microbatches_per_step: int,
) -> int:
    """Return the microbatches that one peer may hold: four times what one pipeline carries.

    A pipeline carries its rate times the round trip of a microbatch without queues (decision 0022).
    A peer that is faster than the others of its stage holds more than they do (0037).

    At least the manifest's default, and at most the microbatches of a step where those are more.
    `activation_seconds` and `gradient_seconds`: a microbatch's at the uplink of a peer.
    """
    borders = len(task_seconds) - 1
    sending = activation_seconds + gradient_seconds
    # Peers of the first and the last stage send one of the two.
    longest_sending = (0.0, max(activation_seconds, gradient_seconds), sending)[min(borders, 2)]
    round_trip = sum(task_seconds) + borders * (2 * HOP_SECONDS + sending)
    carried = round_trip / max(*task_seconds, longest_sending)
    default = LimitsConfig().stage_queue
    return max(default, min(math.ceil(4 * carried), microbatches_per_step, MAX_QUEUE))


def choice_text(
    stages: Sequence[StageWork],
    sequences: int,
    microbatches: int,
    tokens: int,
    queue: int,
) -> str:
    """Return the choice and its reason in one line."""
    share = overhead(stages, sequences)
    if share <= LARGEST_OVERHEAD:
        why = f"the smallest whose overhead is at most {LARGEST_OVERHEAD:.0%} of the computing"
    else:
        why = f"the largest that leave the peers of {len(stages)} stage(s) enough to do"
    return (
        f"microbatches: {microbatches} a step, of {sequences} sequence(s), {tokens} tokens: {why} "
        f"(overhead {share:.0%} on two processor cores); a peer holds up to {queue}"
    )
