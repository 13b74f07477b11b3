"""Signed values: membership certificates, receipts, carrier and owner bindings (design: trust).

Owns the values and the rules by which they are valid. Signing itself is in
`swarm_shared.identity.signing`; the decision about admission is the coordinator's. All times are
Unix seconds, passed in.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from swarm_shared.base.errors import AdmissionError, FrameError, SignatureError
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import (
    CarrierPeerId,
    Count,
    Generation,
    Loss,
    MicrobatchIndex,
    PeerId,
    RunId,
    StageIndex,
    Step,
    UnixSeconds,
)
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import SignedMessage

CLOCK_SKEW_SECONDS = 120.0
"""Largest accepted difference of two clocks. Home machines without NTP drift by minutes;
certificates are valid for hours, so that two more minutes give a revoked peer little."""

FIRST_GENERATION = Generation(0)
"""Oldest generation of a check that accepts every generation."""

Role = Literal["volunteer", "coordinator"]


class MembershipCertificate(SignedMessage):
    """The organiser's certificate that `peer` belongs to the run; shown on every protocol."""

    domain = "swarmtrain-membership-1"

    peer: PeerId
    run: RunId
    generation: Generation
    not_before: UnixSeconds
    expires: UnixSeconds
    role: Role


class Receipt(SignedMessage):
    """A receipt signed by `peer`: it has accumulated one stage of one microbatch."""

    domain = "swarmtrain-receipt-1"
    signed_by = "peer"
    called = "a receipt"

    run: RunId
    generation: Generation
    step: Step = Field(ge=1)
    microbatch: MicrobatchIndex
    stage: StageIndex
    peer: PeerId
    samples: Count
    tokens: Count
    loss_sum: Loss | None = None
    """Loss summed over the tokens; only the last stage has it."""
    transcript: Transcript
    """What crossed the stage's boundaries."""


class CarrierBinding(SignedMessage):
    """A binding signed by `peer`: the p2pd daemon with `carrier_peer_id` is its own."""

    domain = "swarmtrain-carrier-1"
    signed_by = "peer"
    called = "a carrier binding"

    peer: PeerId
    carrier_peer_id: CarrierPeerId
    expires: UnixSeconds


class OwnerBinding(SignedMessage):
    """A binding signed by `owner`: the device's work counts as the owner's.

    It never expires and belongs to no run: the holder of both keys shows it wherever the device
    participates.
    """

    domain = "swarmtrain-owner-1"
    signed_by = "owner"
    called = "an owner binding"

    owner: PeerId
    device: PeerId


def check_certificate(
    envelope: bytes,
    run: RunId,
    organiser: PeerId,
    now: float,
    remote_peer: PeerId,
    oldest_generation: Generation = FIRST_GENERATION,
) -> MembershipCertificate:
    """Return the certificate if it lets `remote_peer` take part in `run` at `now`.

    Raises AdmissionError with the reason otherwise. `remote_peer` must come from the connection,
    which proves it; a certificate is no secret and proves nothing alone. Certificates of
    coordinator starts before `oldest_generation` are rejected.
    """
    try:
        certificate = MembershipCertificate.open(envelope, organiser)
    except (FrameError, SignatureError) as error:
        raise AdmissionError(f"{remote_peer} shows no certificate of this run: {error}") from error
    if certificate.run != run:
        raise AdmissionError(
            f"{remote_peer} is a member of run {certificate.run[:12]}, not of {run[:12]}"
        )
    if certificate.peer != remote_peer:
        raise AdmissionError(f"{remote_peer} shows the certificate of {certificate.peer}")
    if now < certificate.not_before - CLOCK_SKEW_SECONDS:
        wait_seconds = certificate.not_before - now
        raise AdmissionError(
            f"the certificate of {remote_peer} is valid only in {wait_seconds:.0f} s; "
            f"check the clocks of both machines"
        )
    if now > certificate.expires + CLOCK_SKEW_SECONDS:
        raise AdmissionError(
            f"the certificate of {remote_peer} expired {now - certificate.expires:.0f} s ago; "
            f"it must ask the coordinator for a new one"
        )
    if certificate.generation < oldest_generation:
        raise AdmissionError(
            f"the certificate of {remote_peer} is of the coordinator's start "
            f"{certificate.generation}, and those before {oldest_generation} hold no longer; "
            f"it must attach to the coordinator again"
        )
    return certificate


def open_carrier_binding(envelope: bytes, peer: PeerId, now: float) -> CarrierBinding:
    """Return the binding, signed by `peer` and not expired. FrameError or SignatureError
    otherwise."""
    binding = CarrierBinding.open(envelope, peer)
    if now > binding.expires + CLOCK_SKEW_SECONDS:
        raise SignatureError(f"the carrier binding of {peer} has expired")
    return binding


def sign_owner_binding(identity: Identity, device: PeerId) -> bytes:
    return OwnerBinding(owner=identity.peer_id, device=device).sign(identity)


def open_owner_binding(envelope: bytes, device: PeerId) -> OwnerBinding:
    """Return the binding of `device`, signed by the owner it names; FrameError or SignatureError.

    It proves that both agree only if `device` is proven beside it, as a connection does: any key
    can sign a binding for a foreign device.
    """
    binding = OwnerBinding.open(envelope)
    if binding.device != device:
        raise SignatureError(f"{device} shows the owner binding of {binding.device}")
    if binding.owner == device:
        raise SignatureError(
            f"{device} is bound to itself; a device that is its own owner shows no binding"
        )
    return binding
