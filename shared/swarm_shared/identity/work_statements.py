"""Signed values about single microbatches: what may be computed, and what was computed (design:
docs/decisions, number 0036).

A `LeaseTicket` is the coordinator's: this microbatch of this step is leased, with these token ids.
An `AuditPermit` is the coordinator's, too: this auditor may ask these peers for tensors.
A `Transcript` is the part of a receipt that says what crossed the boundaries of a stage, and what
was counted. An `AuditStatement` is a second peer's, which has computed the same microbatch again.
A `SumStatement` says what a member put into an average and what it took out.
Membership certificates and receipts are in `swarm_shared.identity.credentials`.
"""

from __future__ import annotations

from typing import Final

from blake3 import blake3
from pydantic import Field

from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import (
    Count,
    Generation,
    LinearDigest,
    LinearDigests,
    Loss,
    Magnitude,
    MicrobatchIndex,
    NormSketch,
    NormSketches,
    PeerId,
    RunId,
    Seed,
    StageIndex,
    Step,
    WireDigest,
)
from swarm_shared.identity.signing import SignedMessage

DIGEST_BYTES: Final = 16
"""Bytes of a wire digest: finding two inputs with the same one takes about 2^64 trials."""


def wire_digest(*parts: bytes | bytearray | memoryview) -> str:
    """Return the `WireDigest` of the parts, one behind the other: BLAKE3, several gigabytes a
    second on one core."""
    hashed = blake3()
    for part in parts:
        hashed.update(part)
    return hashed.hexdigest(length=DIGEST_BYTES)


class LeaseTicket(SignedMessage):
    """The coordinator's statement that one microbatch is leased, with its token ids.

    It travels with the microbatch through all stages. The token ids of a microbatch are the same
    whenever it is leased, so that a ticket never expires.
    """

    domain = "swarmtrain-ticket-1"

    run: RunId
    step: Step
    microbatch: MicrobatchIndex
    tokens: WireDigest
    """Of the token ids that stage 0 gets, as they cross the wire (uint32, little-endian)."""
    targets: WireDigest
    """Of the targets that the last stage gets."""


class AuditPermit(SignedMessage):
    """The coordinator's statement that an auditor may have tensors of one microbatch, and whose.

    Each order to audit has one; a peer gives each kind of tensors once for it. Without, any member
    could have others compute and send as much as they can.
    """

    domain = "swarmtrain-audit-permit-1"

    run: RunId
    generation: Generation
    audit: Count
    step: Step
    microbatch: MicrobatchIndex
    stage: StageIndex
    """That of the auditor and of the audited peer."""
    auditor: PeerId
    peer: PeerId
    """The audited peer, which gives inputs, or what it computed."""
    before: PeerId | None
    """Gives the output of the stage before."""
    behind: PeerId | None
    """Gives the gradient of the input of the stage behind."""


class AuditStatement(SignedMessage):
    """What an auditor found when it computed a microbatch of another peer's again.

    `transcript` is None when it could not: then the audited peer gave no input that fits its
    receipt. `distance` is set when the auditor compared the tensors themselves.
    """

    domain = "swarmtrain-audit-1"
    signed_by = "auditor"
    called = "an audit"
    max_bytes = 6144
    """Mostly sketches: as an `Envelope` in base64 it has 8,192 characters."""

    run: RunId
    generation: Generation
    audit: Count
    step: Step = Field(ge=1)
    microbatch: MicrobatchIndex
    stage: StageIndex
    peer: PeerId
    """The peer whose receipt is audited."""
    auditor: PeerId
    transcript: Transcript | None
    loss_sum: Loss | None = None
    """Loss summed over the tokens, on the last stage."""
    distance: Magnitude | None = None
    """Largest relative L2 distance between what was claimed and what was computed, over output,
    input gradient and gradient."""
    sums: tuple[LinearDigests, ...] = Field(default=(), max_length=2)
    """Linear digests of the gradient as it is counted, where the order gave a secret: an entry per
    part of the gradient (the stage's own, then the tied one), with a digest per check."""
    sketches: tuple[NormSketches, ...] = Field(default=(), max_length=2)
    """Sketches of the same (`swarm_shared.identity.norm_sketch`)."""


class SumDigests(FrozenModel):
    """Linear digests and sketches of one all-reduce at one member, under the seed of the check."""

    part: LinearDigest
    """Of what the member put in."""
    result: LinearDigest
    """Of what it took out."""
    part_sketch: NormSketch | None = None
    """The sketch of what it put in (`swarm_shared.identity.norm_sketch`). This and the next one:
    only without details."""
    result_sketch: NormSketch | None = None
    """That of what it took out."""
    parts: LinearDigests = ()
    """Of each slice of what it put in, in the order of the reducers. Here and in the following:
    only with details."""
    results: LinearDigests = ()
    """Of each slice of what it took out."""
    received: LinearDigests = ()
    """Of what each member, itself included, put into the slice that this member sums; in the
    members' order, and empty where the member sums nothing."""


class SumStatement(SignedMessage):
    """What one member put into the all-reduces of an attempt to close a step, and took out."""

    domain = "swarmtrain-sum-1"
    signed_by = "peer"
    called = "sums"
    max_bytes = 2**19
    """With details, of an all-reduce with as many members as are allowed."""

    run: RunId
    generation: Generation
    step: Step = Field(ge=1)
    attempt: Count
    stage: StageIndex
    peer: PeerId
    seed: Seed
    weights: Seed | None = None
    """Where the digests are those of the sketches under `seed`: the seed of their weights."""
    checks: tuple[SumDigests, ...] = Field(min_length=1, max_length=4)
    """One per reduction of the Close, in its order, then those of `moving`."""
