"""A volunteer's membership: what the coordinator presents, verified before any of it is used."""

from __future__ import annotations

from dataclasses import dataclass, replace

from swarm_shared.base.clock import wall
from swarm_shared.base.errors import AdmissionError, ProtocolError, SignatureError
from swarm_shared.base.text import duration_text
from swarm_shared.base.types import Generation, PeerId, RunId
from swarm_shared.identity.credentials import (
    CLOCK_SKEW_SECONDS,
    MembershipCertificate,
    check_certificate,
)
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.signed_manifest import open_manifest, run_id_of
from swarm_shared.identity.signing import decode_envelope
from swarm_shared.protocol import Welcome
from swarm_shared.run.manifest import Manifest
from swarm_shared.scheduling.placement.memory_need import check_stage_memory


@dataclass(frozen=True, slots=True)
class Membership:
    """The verified content of a welcome."""

    run: RunId
    organiser: PeerId
    certificate: str
    manifest: Manifest
    generation: Generation


class ClockBehind(AdmissionError):
    """The certificate of a welcome holds only from a time that this machine's clock has yet to
    reach. It is set soon where the machine has just started."""


class CurrentMembership:
    """The newest membership of an admitted volunteer: each session can change its generation, and
    certificates are renewed."""

    def __init__(self, membership: Membership) -> None:
        self.now = membership


def verify_welcome(welcome: Welcome, invite: Invite, me: PeerId) -> Membership:
    """The membership from a welcome.

    SignatureError or AdmissionError when it does not match the invite, ClockBehind when this
    machine's clock is, CapacityError when its manifest hides how much memory a stage needs.
    """
    manifest = open_manifest(
        decode_envelope(welcome.manifest, "the coordinator's manifest"), invite.organiser
    )
    if run_id_of(manifest) != invite.run_id:
        raise SignatureError(
            "the coordinator serves another run than the invite names; ask for a new invite"
        )
    check_stage_memory(manifest)
    membership = Membership(
        invite.run_id, invite.organiser, welcome.certificate, manifest, welcome.generation
    )
    _check(membership, me)
    return membership


def renew_certificate(membership: Membership, certificate: str, me: PeerId) -> Membership:
    """The membership with a newer certificate. ProtocolError when that one is not valid."""
    newer = replace(membership, certificate=certificate)
    try:
        _check(newer, me)
    except AdmissionError as error:
        # The current certificate is still valid: attach again for another one, or for the reason.
        raise ProtocolError(f"the coordinator's new certificate is invalid: {error}") from error
    return newer


def _check(membership: Membership, me: PeerId) -> None:
    envelope, now = decode_envelope(membership.certificate, "the coordinator's certificate"), wall()
    issued_at = MembershipCertificate.open(envelope, membership.organiser).not_before
    if now < issued_at - CLOCK_SKEW_SECONDS:
        raise ClockBehind(
            f"this machine's clock is {duration_text(issued_at - now)} behind the coordinator's; "
            "turn on the setting that takes the time from the internet"
        )
    check_certificate(envelope, membership.run, membership.organiser, now, me)
