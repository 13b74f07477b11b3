"""How many bytes cross one stage's borders per microbatch, and how many a slot must hold.

Free of torch: the daemon and the worker both derive these from the manifest and must agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm_shared.manifest import Manifest

TOKEN_BYTES = 4
"""Token ids and targets cross as uint32."""

SLOT_ALIGNMENT_BYTES = 4096
"""A slot starts on a page, so that any dtype is aligned and a device can pin it."""

WIRE_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class StageSizes:
    """Bytes per microbatch. B sequences, T positions, D hidden size.

    input_bytes: ids_BT of stage 0, activation_BTD elsewhere; also, but for stage 0, the size of
    the input's gradient. target_bytes: targets_BT, which follow the input on the last stage
    only. output_bytes: the output activation_BTD and its gradient; 0 on the last stage.
    """

    input_bytes: int
    target_bytes: int
    output_bytes: int
    gradient_bytes: int
    slot_bytes: int

    @property
    def request_bytes(self) -> int:
        """What a Forward or an Evaluate carries."""
        return self.input_bytes + self.target_bytes


def stage_sizes(manifest: Manifest, stage: int) -> StageSizes:
    """The sizes of one stage's traffic under the manifest."""
    is_first = stage == 0
    is_last = stage == manifest.stage_count - 1
    tokens = manifest.tokens_per_microbatch
    token_bytes = tokens * TOKEN_BYTES
    width = manifest.model.hidden_size * WIRE_DTYPE_BYTES[manifest.training.dtype]
    input_bytes = token_bytes if is_first else tokens * width
    target_bytes = token_bytes if is_last else 0
    output_bytes = 0 if is_last else tokens * width
    largest = max(input_bytes + target_bytes, output_bytes)
    return StageSizes(
        input_bytes=input_bytes,
        target_bytes=target_bytes,
        output_bytes=output_bytes,
        gradient_bytes=0 if is_first else input_bytes,
        slot_bytes=-(-largest // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES,
    )
