"""What a step of a training weighs: gradients to average, tensors to send, computing.

With n machines of equal links in a stage, the time of averaging over that of sending a step's
tensors is 2(n-1) times the ratio of gradients to tensors. A small model with the ratio of a large
one therefore averages for as large a share of its step, where the links limit both. A codec changes
the ratios of both by the same factor.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.wan.fleet import Sizes
from benchmarks.wan.mixes import MBIT
from swarm_coordinator.configuration.run_settings import RunSettings, default_settings
from swarm_coordinator.run_creation.stage_plan import plan_of

REFERENCE = "1b"
"""Preset whose proportions a mix is compared with, in its own number of stages."""
REFERENCE_FLOPS_PER_SECOND = 15e12
"""Rate of a gaming desktop in the simulator's fleet `home`."""


@dataclass(frozen=True, slots=True)
class Proportions:
    """Ratios of one step, with tensors in float32."""

    gradients_over_tensors: float
    """Bytes of the largest stage's gradients over those of all tensors that the stage with most
    boundaries sends."""
    computing_over_sending: float
    """Seconds of a stage's microbatch on one machine over those in which its uplink carries the
    microbatch's tensors."""


def proportions_of(
    sizes: Sizes, microbatch_seconds: float, up_bytes_per_second: float
) -> Proportions:
    return Proportions(
        max(sizes.gradient_bytes) / (sizes.sent_bytes * sizes.microbatches),
        microbatch_seconds / (sizes.sent_bytes / up_bytes_per_second),
    )


def settings_sizes(settings: RunSettings) -> Sizes:
    """Return the sizes of a run that does not exist, all in float32."""
    training, model, plan = settings.training, settings.model_shape, plan_of(settings)
    tokens = training.sequences_per_microbatch * model.sequence_length
    return Sizes(
        work_flops=tuple(stage.work_flops for stage in plan.stages),
        border_bytes=4 * tokens * model.hidden_size,
        gradient_bytes=tuple(4 * work.parameters for work in plan.works),
        microbatches=training.microbatches_per_step,
        tokens_per_microbatch=tokens,
    )


def reference_proportions() -> Proportions:
    """Return those of the preset, on the uplink that its codecs assume."""
    settings = default_settings(REFERENCE)
    sizes = settings_sizes(settings)
    return proportions_of(
        sizes, max(sizes.work_flops) / REFERENCE_FLOPS_PER_SECOND,
        settings.codecs.up_mbit_per_second * MBIT,
    )  # fmt: skip
