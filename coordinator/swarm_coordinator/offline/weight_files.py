"""The weights of an exported model: their dtype, and one safetensors file or several with an index.

The files are named and divided as `transformers` does it. Holds one tensor in memory at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from swarm_coordinator.offline.merged_stages import MergedStages, WithAdapters
from swarm_shared.base.atomic_file import storage_error, write_atomically
from swarm_shared.base.errors import StorageError
from swarm_shared.model.state import save_tensors

ExportDtype = Literal["float32", "bfloat16", "float16"]

SHARD_BYTES = 5 * 10**9
"""Largest file unless another size is chosen; what `transformers` wrote for years, and what every
host of files takes."""

_DTYPES: Mapping[ExportDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTERS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
"""The prefix that peft puts before the names of a model's parameters."""
_FILES = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")


def is_weight_file(name: str) -> bool:
    """Return whether an export writes a file of this name."""
    return name == _ADAPTERS or _FILES.fullmatch(name) is not None


def check_range(merged: MergedStages | WithAdapters, dtype: ExportDtype) -> None:
    """StorageError for a value that `dtype` cannot hold; only float16 has a smaller range."""
    if dtype == "float16":
        for name in merged.shapes:
            _converted(name, merged.read(name), torch.float16)


def write_weights(
    merged: MergedStages | WithAdapters,
    folder: Path,
    dtype: ExportDtype,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the files of the weights in place of those of an earlier export in the folder.

    StorageError for a value that float16 cannot hold.
    """
    _remove_weights(folder)
    described = {
        name: torch.empty(shape, dtype=_DTYPES[dtype], device="meta")
        for name, shape in merged.shapes.items()
    }
    sizes = {name: tensor.nbytes for name, tensor in described.items()}
    shards = plan_shards(sizes, shard_bytes)
    names = [shard_name(number, len(shards)) for number in range(len(shards))]

    def read(name: str) -> torch.Tensor:
        return _converted(name, merged.read(name), _DTYPES[dtype])

    for name, shard in zip(names, shards, strict=True):
        content = {parameter: described[parameter] for parameter in shard}
        save_tensors(folder / name, content, read, {"format": "pt"})
    if len(shards) > 1:
        weight_map = {p: name for name, shard in zip(names, shards, strict=True) for p in shard}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_atomically(folder / _INDEX, (json.dumps(index, indent=2) + "\n").encode())


def write_adapters(adapters: MergedStages, folder: Path, dtype: ExportDtype) -> None:
    """Write the file of the adapters in place of what an earlier export has left in the folder."""
    _remove_weights(folder)
    described = {
        _PEFT_PREFIX + name: torch.empty(shape, dtype=_DTYPES[dtype], device="meta")
        for name, shape in adapters.shapes.items()
    }

    def read(name: str) -> torch.Tensor:
        return _converted(name, adapters.read(name.removeprefix(_PEFT_PREFIX)), _DTYPES[dtype])

    save_tensors(folder / _ADAPTERS, described, read, {"format": "pt"})


def plan_shards(sizes: Mapping[str, int], most_bytes: int) -> list[list[str]]:
    """Divide tensors, in their order, into files of at most `most_bytes` of values; a larger tensor
    has a file of its own."""
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > most_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def shard_name(number: int, count: int) -> str:
    """Return the name of a file, counted from 0."""
    return _SINGLE if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"


def _remove_weights(folder: Path) -> None:
    for path in folder.iterdir():
        if is_weight_file(path.name):
            try:
                path.unlink()
            except OSError as error:
                raise storage_error(path, error) from error


def _converted(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    converted = tensor.to(dtype)
    if dtype is torch.float16 and not bool(torch.isfinite(converted).all()):
        raise StorageError(
            f"{name} holds {float(tensor.abs().max()):g}, and float16 ends at 65504; export with "
            "--dtype bfloat16"
        )
    return converted
