"""Small manifests, of which a test names only what it is about."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from kits.peer_names import named
from swarm_shared.run.manifest import Manifest, ShardInfo, StageRange
from swarm_shared.run.model_config import ModelConfig


def shard(name: str, tokens: int = 1000, merkle_root: str = "0" * 64) -> ShardInfo:
    """A shard of the split that its name begins with."""
    split = name.partition("-")[0]
    return ShardInfo(name=f"{name}.tokens", split=split, tokens=tokens, merkle_root=merkle_root)


def stage_ranges(*ends: int) -> tuple[StageRange, ...]:
    """Stages that end before these layers."""
    return tuple(StageRange(first_layer=low, end_layer=high) for low, high in pairwise((0, *ends)))


def equal_stages(layers: int, count: int) -> tuple[StageRange, ...]:
    """So many stages, as equal as whole layers allow."""
    return stage_ranges(*(round(layers * index / count) for index in range(1, count + 1)))


PARTS: dict[str, dict[str, Any]] = {
    "model": {
        "vocabulary_size": 256, "hidden_size": 8, "intermediate_size": 8, "layers": 1, "heads": 1,
        "key_value_heads": 1, "sequence_length": 4,
    },
    "data": {
        "token_bytes": 1, "shards": (shard("train"), shard("heldout")), "tokenizer": "bytes",
        "unigram_entropy_nats": 3.0,
    },
    "training": {
        "steps": 10, "microbatches_per_step": 4, "sequences_per_microbatch": 2, "seed": 5,
    },
    "optimizer": {"learning_rate": 0.1, "warmup_steps": 1},
}  # fmt: skip


def manifest_of(**changes: Any) -> Manifest:
    """The manifest of a run; what `changes` says of a part is merged into the part."""
    values: dict[str, Any] = {"name": "test", "organiser": named("Lord"), **PARTS, **changes}
    for name, part in PARTS.items():
        if isinstance(values[name], dict):
            values[name] = part | values[name]
    model = values["model"]
    layers = model.layers if isinstance(model, ModelConfig) else model["layers"]
    values.setdefault("stages", stage_ranges(layers))
    return Manifest.model_validate(values)
