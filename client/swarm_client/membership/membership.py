"""A volunteer's membership: what the coordinator presents, verified before any of it is used."""

from __future__ import annotations

from dataclasses import dataclass, replace

from swarm_shared.base.clock import RunClock
from swarm_shared.base.errors import AdmissionError, ProtocolError, SignatureError
from swarm_shared.base.types import Generation, PeerId, RunId
from swarm_shared.identity.credentials import (
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


class CurrentMembership:
    """The newest membership of an admitted volunteer: each session can change its generation, and
    certificates are renewed."""

    def __init__(self, membership: Membership) -> None:
        self.now = membership


def verify_welcome(welcome: Welcome, invite: Invite, me: PeerId, clock: RunClock) -> Membership:
    """The membership from a welcome; its certificate gives `clock` the run's time.

    SignatureError or AdmissionError when it does not match the invite, CapacityError when its
    manifest hides how much memory a stage needs.
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
    _check(membership, me, clock)
    return membership


def renew_certificate(
    membership: Membership, certificate: str, me: PeerId, clock: RunClock
) -> Membership:
    """The membership with a newer certificate, which sets `clock` again. ProtocolError when that
    one is not valid."""
    newer = replace(membership, certificate=certificate)
    try:
        _check(newer, me, clock)
    except AdmissionError as error:
        # The current certificate is still valid: attach again for another one, or for the reason.
        raise ProtocolError(f"the coordinator's new certificate is invalid: {error}") from error
    return newer


def _check(membership: Membership, me: PeerId, clock: RunClock) -> None:
    envelope = decode_envelope(membership.certificate, "the coordinator's certificate")
    # The coordinator has issued it for this message: it says what time it is there.
    now = MembershipCertificate.open(envelope, membership.organiser).not_before
    check_certificate(envelope, membership.run, membership.organiser, now, me)
    clock.learn(now)
