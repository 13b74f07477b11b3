"""The data section of manifests whose data is never read."""

from __future__ import annotations

from swarm_shared.run.manifest import DataConfig, ShardInfo

NO_DATA = DataConfig(
    token_bytes=2, tokenizer="bytes", unigram_entropy_nats=3.0,
    shards=(
        ShardInfo(name="a.tokens", split="train", tokens=9, merkle_root="0" * 64),
        ShardInfo(name="b.tokens", split="heldout", tokens=9, merkle_root="0" * 64),
    ),
)  # fmt: skip
