"""Conversion between the bytes of a slot and tensors in host memory.

Owns the checks on received payloads (size, token ids, finiteness) and the copies in and out of
slots. The manifest's codec determines the encoding of activations and gradients; tensors are copied
to the device by `swarm_client.stage.worker.transfer.device_copier`. The decoded tensor is what is
kept for recomputing a microbatch, because the computation used it.

Shape suffixes: B sequences, T positions, D the width of a stage boundary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_client.stage.protocol.errors import RequestFailed
from swarm_client.stage.protocol.slot_sizes import SlotSizes
from swarm_shared.base.errors import ProtocolError
from swarm_shared.codecs.errors import CodecError
from swarm_shared.codecs.tensors import DTYPES, decode, encode
from swarm_shared.model import check_token_values
from swarm_shared.model.fixed_point_sums import extremes
from swarm_shared.run.codec_sizes import CodecName
from swarm_shared.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class MicrobatchInput:
    """A stage's input and targets in host memory, checked: ids_BT (int64) or activation_BTD."""

    inputs: Tensor
    targets_BT: Tensor | None  # noqa: N815


def all_finite(tensors: list[Tensor]) -> bool:
    """Whether all tensors are finite, with a single wait for the device."""
    return all(
        math.isfinite(bound)
        for tensor, bounds in zip(tensors, extremes(tensors), strict=True)
        if tensor.numel()
        for bound in bounds
    )


class PayloadCodec:
    """Reads and writes the payloads of one stage."""

    def __init__(self, manifest: Manifest, sizes: SlotSizes, is_first: bool, is_last: bool):
        self._sizes = sizes
        self._is_first = is_first
        self._is_last = is_last
        self._vocabulary_size = manifest.model.vocabulary_size
        self._shape_BT = (
            manifest.training.sequences_per_microbatch,
            manifest.model.sequence_length,
        )
        self._shape_BTD = (*self._shape_BT, manifest.model.boundary_size)
        self._dtype = manifest.training.dtype
        self._codecs = manifest.codecs

    def read_input(self, payload: memoryview) -> MicrobatchInput:
        """Decode the payload of a RunForward: the input and, on the last stage,
        the targets."""
        self._check_size(payload, self._sizes.request_bytes, "a microbatch")
        inputs = payload[: self._sizes.input_bytes]
        targets_BT = None
        if self._is_last:
            targets_BT = self._tokens(payload[self._sizes.input_bytes :], "targets")
        if self._is_first:
            return MicrobatchInput(self._tokens(inputs, "inputs"), targets_BT)
        activation_BTD = self._decode(self._codecs.activation, inputs, "the input activation")
        return MicrobatchInput(activation_BTD, targets_BT)

    def read_gradient(self, payload: memoryview) -> Tensor:
        """Decode the payload of a RunBackward: the output's gradient_BTD in host memory."""
        self._check_size(payload, self._sizes.output_gradient_bytes, "an output's gradient")
        return self._decode(self._codecs.gradient, payload, "the gradient of the output")

    def write_output(self, activation_BTD: Tensor, slot: memoryview) -> int:
        """Encode the output for the next stage into a slot; returns its bytes."""
        return encode(self._codecs.activation, activation_BTD.to(DTYPES[self._dtype]), slot)

    def write_input_gradient(self, gradient_BTD: Tensor, slot: memoryview) -> int:
        """Encode the input's gradient for the previous stage into a slot; returns its bytes."""
        return encode(self._codecs.gradient, gradient_BTD.to(DTYPES[self._dtype]), slot)

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

    def _decode(self, codec: CodecName, payload: memoryview, what: str) -> Tensor:
        try:
            return decode(codec, payload, self._shape_BTD, self._dtype)
        except CodecError as error:
            raise RequestFailed("bad_input", f"{what}: {error}") from error
