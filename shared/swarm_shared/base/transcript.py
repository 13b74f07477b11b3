"""Transcripts: what crossed the boundaries of a stage, in digests.

A transcript is part of a receipt and of an auditor's statement
(`swarm_shared.identity.work_statements`), and of the order to audit.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal

from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import WireDigest

GRADIENT_BLOCK_BYTES: Final = 2**16
"""Bytes of a gradient's block, but for the last one. Hashing blocks of this size takes a sixth
longer than hashing the whole, and those of 16 KiB a third (measured on two cores on 2026-11-29)."""


class Transcript(FrozenModel):
    """Digests of what one stage received, returned and counted for one microbatch.

    All are of bytes as they cross the wire, so that two peers that exchanged them agree.
    """

    input: WireDigest
    """Of the activation that came in; at stage 0 of the token ids."""
    output: WireDigest
    """Of the activation that went out; at the last stage of the targets."""
    output_gradient: WireDigest | Literal[""] = ""
    """Of the gradient that came back; empty at the last stage."""
    input_gradient: WireDigest | Literal[""] = ""
    """Of the gradient that was returned; empty at stage 0."""
    gradient: WireDigest
    """Of the digests of all blocks of the parameters' gradient, in the form in which it is added to
    the accumulator."""


class KeptTensors(StrEnum):
    """What a peer that has counted a microbatch can show of it to an auditor."""

    INPUTS = "inputs"
    """The input, the targets and the output's gradient, as they came."""
    COMPUTED = "computed"
    """What they give, before the run's codecs round it."""
    OUTPUT = "output"
    """As it was sent: the input of the stage behind."""
    INPUT_GRADIENT = "input_gradient"
    """As it was sent: the output's gradient of the stage before."""
