"""A stage's state: named tensors, files that are never half-written, strict loading.

Owns the names (`<parameter>`, `optimizer.exp_avg.<parameter>`, `optimizer.exp_avg_sq.<parameter>`,
`optimizer.step`, and where gradients lag a step behind `previous.<parameter>`, of the version
before), the safetensors files and the checks of what is loaded. Does not own which checkpoint is
current, nor the hashes that a run keeps of them. No pickle anywhere.

The writer is our own: it holds one tensor at a time in memory, sorts by name, so that equal states
make equal bytes, and a full disk is a plain OSError to `atomic_file`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from swarm_shared.base.atomic_file import atomic_file
from swarm_shared.base.errors import ProtocolError, StorageError
from swarm_shared.model.llama import NamedParameters, Stage
from swarm_shared.model.optimizer import AdamW

FIRST_MOMENT = "optimizer.exp_avg."
SECOND_MOMENT = "optimizer.exp_avg_sq."
STEP_NAME = "optimizer.step"
OPTIMIZER_PREFIX = "optimizer."
PREVIOUS_PREFIX = "previous."
"""Prefix of parameters of the version before; the model's own names begin otherwise."""

_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
}
_WRITE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class StoredState:
    """The contents of a state file. The tensors may be mapped from the file: they are read only."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def state_to_tensors(
    stage: Stage, optimizer: AdamW, previous: Stage | None = None
) -> dict[str, Tensor]:
    """Return everything that training needs to continue. No copies: valid until the next
    `apply_step`.

    `previous` holds the parameters of the version before, at version 0 those of version 0; a run of
    staleness 1 needs them for the next step's gradients.
    """
    tensors: dict[str, Tensor] = {}
    steps: set[int] = set()
    moments = zip(optimizer.first_moments, optimizer.second_moments, optimizer.steps, strict=True)
    for (name, parameter), (first, second, taken) in zip(
        stage.all_parameters(), moments, strict=True
    ):
        tensors[name] = parameter.detach()
        tensors[FIRST_MOMENT + name] = first
        tensors[SECOND_MOMENT + name] = second
        steps.add(int(taken.item()))
    assert len(steps) <= 1, "all parameters step together"
    tensors[STEP_NAME] = torch.tensor(steps.pop() if steps else 0, dtype=torch.int64)
    if previous is not None:
        for name, parameter in previous.all_parameters():
            tensors[PREVIOUS_PREFIX + name] = parameter.detach()
    return tensors


def load_state(
    stage: Stage,
    optimizer: AdamW,
    tensors: Mapping[str, Tensor],
    previous: Stage | None = None,
) -> None:
    """Load `tensors` from a peer or a file. All checks precede the first change.

    `previous` takes the parameters of the version before, which must then be present.
    """
    expected = state_to_tensors(stage, optimizer, previous)
    _check(expected, tensors)
    step = int(tensors[STEP_NAME].item())
    if not 0 <= step < 1 << 24:
        raise ProtocolError(
            f"the state's optimizer step is {step}; 0 to 16777215 is needed: fetch the state "
            "from another peer"
        )
    with torch.no_grad():
        for name, target in expected.items():
            if name != STEP_NAME:
                target.copy_(tensors[name])
        optimizer.set_steps(step)


def is_parameter(name: str) -> bool:
    """Whether a tensor of a state is a parameter of its version, and not what training needs
    besides."""
    return not name.startswith((OPTIMIZER_PREFIX, PREVIOUS_PREFIX))


def load_parameters(stage: Stage, tensors: Mapping[str, Tensor]) -> None:
    """Load the trained parameters of a stage, without an optimizer's state. All checks precede the
    first change."""
    _load(stage.all_parameters(), tensors)


def load_frozen(stage: Stage, tensors: Mapping[str, Tensor]) -> None:
    """Load the frozen parameters of a stage that trains adapters. All checks precede the first
    change."""
    _load(stage.frozen_parameters(), tensors)


def _load(parameters: NamedParameters, tensors: Mapping[str, Tensor]) -> None:
    expected: dict[str, Tensor] = {name: p.detach() for name, p in parameters}
    _check(expected, tensors)
    for name, target in expected.items():
        target.copy_(tensors[name])


def save_state(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write `path` as safetensors, all or nothing. Equal inputs make equal bytes."""
    save_tensors(path, tensors, tensors.__getitem__, metadata)


def save_tensors(
    path: Path,
    described: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write `path` as `save_state` does, of tensors that are read one after the other.

    `described` has each one's shape and dtype; its tensors need no values (`meta`).
    """
    with atomic_file(path) as file:
        _write_safetensors(file, described, read, metadata)


def open_state(path: Path) -> StoredState:
    """Read a state file; its contents are checked by `load_state`, not here."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return StoredState(tensors, dict(file.metadata() or {}))
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"{path} cannot be read as a stage's state ({error}); use an older checkpoint or "
            "download the stage again"
        ) from error


def _write_safetensors(
    file: BinaryIO,
    described: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write the format: length of the header (u64), header (JSON, padded to 8 bytes), raw
    values."""
    assert sys.byteorder == "little", "safetensors holds little-endian values"
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    position = 0
    for name, tensor in sorted(described.items()):
        end = position + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, tensor in sorted(described.items()):
        _write_values(file, tensor, read(name))  # in no variable: freed before the next one is read


def _write_values(file: BinaryIO, described: Tensor, tensor: Tensor) -> None:
    assert (tensor.shape, tensor.dtype) == (described.shape, described.dtype)
    values = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy()
    for start in range(0, len(values), _WRITE_BYTES):
        file.write(values[start : start + _WRITE_BYTES].data)


def _check(expected: Mapping[str, Tensor], seen: Mapping[str, Tensor]) -> None:
    missing = sorted(expected.keys() - seen.keys())
    unknown = sorted(seen.keys() - expected.keys())
    if missing or unknown:
        example = f"{missing[0]!r} is missing" if missing else f"{unknown[0]!r} is unknown"
        raise ProtocolError(
            f"the state is not this stage's: {len(missing)} names missing and {len(unknown)} "
            f"unknown ({example}); fetch the state of the right stage"
        )
    for name, target in expected.items():
        _check_tensor(name, target, seen[name])


def _check_tensor(name: str, target: Tensor, seen: Tensor) -> None:
    if seen.shape != target.shape or seen.dtype != target.dtype:
        raise ProtocolError(
            f"the state's {name!r} has shape {tuple(seen.shape)} and dtype {seen.dtype}; "
            f"{tuple(target.shape)} and {target.dtype} are needed"
        )
    if not seen.is_floating_point():
        return
    # min and max are NaN if any element is: one pass without a temporary mask.
    low, high = (float(bound) for bound in torch.aminmax(seen))
    finite = low > float("-inf") and high < float("inf")
    if not finite or (name.startswith(SECOND_MOMENT) and low < 0):
        raise ProtocolError(
            f"the state's {name!r} holds values from {low} to {high}, which training cannot "
            "have made; fetch the state from another peer"
        )
