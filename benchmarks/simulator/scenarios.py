"""Manifests of runs to simulate, made without building their models."""

from __future__ import annotations

from swarm_shared.base.types import PeerId
from swarm_shared.model.profile import profile_layers
from swarm_shared.run.manifest import (
    DataConfig,
    LimitsConfig,
    Manifest,
    OptimizerConfig,
    ShardInfo,
    TrainingConfig,
)
from swarm_shared.run.model_config import preset
from swarm_shared.run.stage_cut import plan_stages, stage_memory, stage_profile


def manifest_of(
    preset_name: str, stages: int, microbatches_per_step: int, *, layers: int | None = None,
    sequences: int | None = None, limits: LimitsConfig | None = None,
) -> Manifest:  # fmt: skip
    """Return a manifest as `init` would make it, with other sizes; its data are never read."""
    chosen = preset(preset_name)
    model = chosen.model.model_copy(update={"layers": layers or chosen.model.layers})
    training = TrainingConfig.model_validate(
        {
            "steps": chosen.steps,
            "microbatches_per_step": microbatches_per_step,
            "sequences_per_microbatch": sequences or chosen.sequences_per_microbatch,
            "dtype": "bfloat16",
            "seed": 1,
        }
    )
    profile = profile_layers(model, training.sequences_per_microbatch, training.dtype)
    planned = plan_stages(profile, stages)
    last = len(planned) - 1
    described = tuple(
        stage.model_copy(
            update={
                "work_flops": float(
                    stage_profile(profile, stage, number == 0, number == last).flops
                ),
                "memory": stage_memory(profile, stage, number == 0, number == last),
            }
        )
        for number, stage in enumerate(planned)
    )
    return Manifest(
        name=f"{preset_name} in {stages} stages",
        organiser=PeerId("12D3KooW" + "1" * 44),
        model=model,
        stages=described,
        data=_no_data(),
        training=training,
        optimizer=OptimizerConfig(learning_rate=chosen.learning_rate, warmup_steps=1),
        limits=limits or LimitsConfig(),
    )


def _no_data() -> DataConfig:
    def shard(name: str, split: str) -> ShardInfo:
        return ShardInfo.model_validate(
            {"name": name, "split": split, "tokens": 1, "merkle_root": "0" * 64}
        )

    return DataConfig(
        token_bytes=2, tokenizer="bpe", unigram_entropy_nats=1.0,
        shards=(shard("train.tokens", "train"), shard("heldout.tokens", "heldout")),
    )  # fmt: skip
