"""The stages of a new run: what each holds, computes and takes of memory, and the size of the
microbatches that they work on.

The cut itself is `swarm_shared.run.stage_cut`'s. Imports torch to profile the model's layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from swarm_coordinator.configuration.run_settings import RunSettings
from swarm_coordinator.run_creation.microbatch_size import (
    StageWork,
    choose_sequences,
    least_microbatches,
)
from swarm_shared.base.errors import ConfigurationError
from swarm_shared.base.types import MAX_MICROBATCHES
from swarm_shared.run.manifest import StageRange, with_bottlenecks
from swarm_shared.run.model_config import ComputeDtype, ModelConfig
from swarm_shared.run.stage_cut import (
    ModelProfile,
    parameter_memory,
    plan_stages,
    stage_memory,
    stage_profile,
)
from swarm_shared.scheduling.placement.stage_sizes import bottleneck_parameters


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The cut of the model, and what each stage computes."""

    stages: tuple[StageRange, ...]
    works: tuple[StageWork, ...]


def in_stages(settings: RunSettings, count: int) -> RunSettings:
    """Return the settings with another number of stages."""
    stages = settings.stages.model_copy(update={"count": count})
    return settings.model_copy(update={"stages": stages})


def profile_of(settings: RunSettings) -> ModelProfile:
    """Return the cost of the model's parts for one microbatch."""
    training = settings.training
    return _profile(settings.model_shape, training.sequences_per_microbatch, training.dtype)


@cache
def _profile(model: ModelConfig, sequences: int, dtype: ComputeDtype) -> ModelProfile:
    # Imported here because it imports torch, which takes seconds.
    from swarm_shared.model.profile import profile_layers

    return profile_layers(model, sequences, dtype)


def plan_of(settings: RunSettings, cut: Sequence[StageRange] | None = None) -> StagePlan:
    """Describe the stages of `cut`; by default, of the one whose slowest stage has the fewest
    FLOPs."""
    model, count = settings.model_shape, settings.stages.count
    if model.has_adapters and count > model.layers:
        raise ConfigurationError(
            f"[stages] count is {count} and the model has {model.layers} layers: with adapters "
            "every stage needs a layer, as nothing else is trained"
        )
    training, profile = settings.training, profile_of(settings)
    staleness, exact = training.staleness, settings.codecs.average == "exact"
    stages = cut or plan_stages(profile, count, staleness=staleness, exact=exact)
    tokens = training.sequences_per_microbatch * model.sequence_length
    narrow, widen = bottleneck_parameters(with_bottlenecks(model, stages))
    described: list[StageRange] = []
    works: list[StageWork] = []
    for number, stage in enumerate(stages):
        ends = number == 0, number == len(stages) - 1
        more = (0 if ends[1] else narrow) + (0 if ends[0] else widen)
        part = stage_profile(profile, stage, *ends)
        memory = stage_memory(profile, stage, *ends, staleness=staleness, exact=exact)
        # Per weight and token of a matrix: two operations forward, four backward.
        flops = float(part.flops + 6 * tokens * more)
        figures = {
            "work_flops": flops,
            "memory": memory + parameter_memory(more, staleness, exact),
        }
        described.append(stage.model_copy(update=figures))
        works.append(
            StageWork(
                flops_per_sequence=flops / training.sequences_per_microbatch,
                layers=stage.end_layer - stage.first_layer,
                parameters=part.parameters + more,
            )
        )
    return StagePlan(tuple(described), tuple(works))


def with_microbatches_chosen(settings: RunSettings) -> RunSettings:
    """Divide the preset's sequences of a step into microbatches of the chosen size."""
    training, stages = settings.training, settings.stages.count
    whole = training.microbatches_per_step * training.sequences_per_microbatch
    sequences = choose_sequences(
        plan_of(settings).works,
        whole,
        least_microbatches(stages, settings.limits.starting_peers_per_stage),
        MAX_MICROBATCHES - training.evaluation_microbatches,
    )
    sizes = {"sequences_per_microbatch": sequences, "microbatches_per_step": whole // sequences}
    return settings.model_copy(update={"training": training.model_copy(update=sizes)})
