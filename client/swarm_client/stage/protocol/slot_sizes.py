"""Bytes that cross one stage's boundaries per microbatch, and the size of a slot.

Free of torch: the daemon and the worker both derive these from the manifest and must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm_client.stage.protocol import gradient_blocks
from swarm_shared.run.codec_sizes import DTYPE_BYTES
from swarm_shared.run.manifest import Manifest

TOKEN_BYTES = 4
"""Bytes of a token id or target on the wire (uint32)."""

GRADIENT_ELEMENT_BYTES = 4
"""An element of a parameter's gradient as it is counted: a float32."""

SLOT_ALIGNMENT_BYTES = 4096
"""Alignment of slots in bytes, a page, so that any dtype is aligned and a device can pin it."""


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """Bytes per microbatch, in the manifest's encoding. B sequences, T positions, D the boundary's
    width.

    input_bytes: ids_BT of stage 0, activation_BTD elsewhere. target_bytes: targets_BT, which follow
    the input on the last stage only. input_gradient_bytes: the answer to the input; 0 on stage 0.
    output_bytes, output_gradient_bytes: the activation_BTD sent on and the gradient that comes
    back; 0 on the last stage. tensor_bytes: an activation_BTD without encoding.
    """

    input_bytes: int
    target_bytes: int
    input_gradient_bytes: int
    output_bytes: int
    output_gradient_bytes: int
    slot_bytes: int
    tensor_bytes: int

    @property
    def request_bytes(self) -> int:
        """Bytes of the payload of a RunForward."""
        return self.input_bytes + self.target_bytes

    def computed_bytes(self, elements: int, blocks: Sequence[int]) -> int:
        """Bytes of what a stage of so many parameters computes of a microbatch, as an auditor
        compares it: before encoding, with these blocks of the gradient."""
        tensors = bool(self.output_bytes) + bool(self.input_gradient_bytes)
        shown = gradient_blocks.shown_bytes(blocks, elements * GRADIENT_ELEMENT_BYTES)
        return tensors * self.tensor_bytes + shown


def slot_sizes(manifest: Manifest, stage: int) -> SlotSizes:
    """The sizes of one stage's traffic under the manifest."""
    is_first = stage == 0
    is_last = stage == manifest.stage_count - 1
    token_bytes = manifest.tokens_per_microbatch * TOKEN_BYTES
    input_bytes = token_bytes if is_first else manifest.activation_bytes
    target_bytes = token_bytes if is_last else 0
    input_gradient_bytes = 0 if is_first else manifest.gradient_bytes
    output_bytes = 0 if is_last else manifest.activation_bytes
    output_gradient_bytes = 0 if is_last else manifest.gradient_bytes
    largest = max(
        input_bytes + target_bytes, input_gradient_bytes, output_bytes, output_gradient_bytes
    )
    return SlotSizes(
        input_bytes=input_bytes,
        target_bytes=target_bytes,
        input_gradient_bytes=input_gradient_bytes,
        output_bytes=output_bytes,
        output_gradient_bytes=output_gradient_bytes,
        slot_bytes=-(-largest // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES,
        tensor_bytes=manifest.tokens_per_microbatch
        * manifest.model.boundary_size
        * DTYPE_BYTES[manifest.training.dtype],
    )
