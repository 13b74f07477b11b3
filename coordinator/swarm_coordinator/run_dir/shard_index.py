"""`shards.json`: the index of a folder of tokenised shards, and how it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from swarm_shared.base.errors import DataError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.json_messages import first_error
from swarm_shared.run.manifest import DataConfig

SHARD_INDEX = "shards.json"
"""Name of the index file within the folder."""


class DataReport(FrozenModel):
    """What was read of the training text, and what was left out of it, in documents."""

    documents: int = Field(ge=0)
    """Documents in the shards, of both splits."""
    text_bytes: int = Field(ge=0)
    """Their text in UTF-8."""
    duplicates: int = Field(ge=0)
    """Equal to an earlier one."""
    near_duplicates: int = Field(default=0, ge=0)
    """Nearly equal to an earlier one, where these are left out."""
    empty: int = Field(ge=0)
    too_long: int = Field(ge=0)


class ShardIndex(FrozenModel):
    """The content of `shards.json`: the shards of a folder and what they were made from."""

    format: Literal[1] = 1
    source: str
    column: str
    tokenizer: str
    """The setting: "bytes", "bpe", or the path of the organiser's file."""
    heldout_share: float
    similarity: float = 1.0
    """From which on a document repeats an earlier one; 1 where only equal ones do."""
    vocabulary_size: int = Field(ge=2)
    """Vocabulary size of the tokenizer; every id in the shards is below it."""
    data: DataConfig
    report: DataReport


def read_shard_index(folder: Path) -> ShardIndex:
    """Read the index; DataError when it is missing or malformed."""
    path = folder / SHARD_INDEX
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); restore it from a copy, or name a folder "
            "that `swarm-coordinator init` wrote"
        ) from error
    try:
        return ShardIndex.model_validate_json(content)
    except ValidationError as error:
        raise DataError(
            f"{path} does not describe shards ({first_error(error)}); "
            "use a folder that `swarm-coordinator init` wrote"
        ) from error
