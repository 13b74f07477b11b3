"""Tensors between the bytes of a slot and host memory (`device_copier` takes them on from there).

Owns the checks on what comes in (size, token ids, finiteness) and the copies in and out of slots.

Shape suffixes: B sequences, T positions, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_client.worker.errors import RequestFailed
from swarm_client.worker.sizes import StageSizes
from swarm_shared.errors import ProtocolError
from swarm_shared.manifest import Manifest
from swarm_shared.model import check_token_values

WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class MicrobatchInput:
    """A stage's input and targets in host memory, checked: ids_BT (int64) or activation_BTD."""

    inputs: Tensor
    targets_BT: Tensor | None  # noqa: N815

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + (0 if self.targets_BT is None else self.targets_BT.nbytes)


def is_finite(tensor: Tensor) -> bool:
    """One pass, no temporary mask: 20 times as fast as isfinite().all() on a CPU."""
    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor.detach())
    # Comparisons with NaN are false.
    return bool((low > float("-inf")) & (high < float("inf")))


def all_finite(tensors: list[Tensor]) -> bool:
    """`is_finite` of all, with one wait for the device."""
    bounds = [b.float() for t in tensors if t.numel() for b in torch.aminmax(t.detach())]
    return not bounds or bool(torch.stack(bounds).isfinite().all())


class PayloadCodec:
    """Reads and writes the payloads of one stage."""

    def __init__(self, manifest: Manifest, sizes: StageSizes, is_first: bool, is_last: bool):
        self._sizes = sizes
        self._is_first = is_first
        self._is_last = is_last
        self._vocabulary_size = manifest.model.vocabulary_size
        self._shape_BT = (
            manifest.training.sequences_per_microbatch,
            manifest.model.sequence_length,
        )
        self._hidden_size = manifest.model.hidden_size
        self._dtype = WIRE_DTYPES[manifest.training.dtype]

    def read_input(self, payload: memoryview) -> MicrobatchInput:
        """A Forward's or Evaluate's payload: the input and, on the last stage, the targets."""
        self._check_size(payload, self._sizes.request_bytes, "a microbatch")
        inputs = payload[: self._sizes.input_bytes]
        targets_BT = None
        if self._is_last:
            targets_BT = self._tokens(payload[self._sizes.input_bytes :], "targets")
        if self._is_first:
            return MicrobatchInput(self._tokens(inputs, "inputs"), targets_BT)
        return MicrobatchInput(self._activation(inputs, "the input activation"), targets_BT)

    def read_gradient(self, payload: memoryview) -> Tensor:
        """A Backward's payload: the gradient of the output, gradient_BTD in host memory."""
        self._check_size(payload, self._sizes.output_bytes, "an output's gradient")
        return self._activation(payload, "the gradient of the output")

    def write(self, tensor: Tensor, slot: memoryview) -> int:
        """Put an activation or a gradient into a slot; returns its bytes."""
        wire = tensor.detach().to(self._dtype)
        nbytes = wire.nbytes
        target = torch.frombuffer(slot[:nbytes], dtype=self._dtype)
        target.copy_(wire.reshape(-1))
        return nbytes

    def _check_size(self, payload: memoryview, nbytes: int, what: str) -> None:
        if payload.nbytes != nbytes:
            raise RequestFailed(
                "bad_input",
                f"{what} came with {payload.nbytes} bytes; {nbytes} are needed: sender and "
                "receiver hold different manifests",
            )

    def _tokens(self, payload: memoryview, what: str) -> Tensor:
        wire = torch.frombuffer(payload, dtype=torch.uint32)
        tokens_BT = wire.to(torch.int64).view(self._shape_BT)
        try:
            check_token_values(tokens_BT, self._vocabulary_size)
        except ProtocolError as error:
            raise RequestFailed("bad_input", f"{what}: {error}") from error
        return tokens_BT

    def _activation(self, payload: memoryview, what: str) -> Tensor:
        wire = torch.frombuffer(payload, dtype=self._dtype)
        if not is_finite(wire):
            raise RequestFailed(
                "bad_input",
                f"{what} holds infinities or NaNs; the peer that sent it computes wrongly",
            )
        return wire.clone().view(*self._shape_BT, self._hidden_size)
