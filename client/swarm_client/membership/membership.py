"""A volunteer's membership: what the coordinator shows it, checked before any of it is used."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from swarm_shared.base.errors import AdmissionError, ProtocolError, SignatureError
from swarm_shared.base.types import Generation, PeerId, RunId
from swarm_shared.identity.credentials import check_certificate
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.signed_manifest import open_manifest, run_id_of
from swarm_shared.identity.signing import decode_envelope
from swarm_shared.protocol import Welcome
from swarm_shared.run.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Membership:
    """What being welcomed gave this peer. Satisfies the stage server's protocol of that name."""

    run: RunId
    organiser: PeerId
    certificate: str
    manifest: Manifest
    generation: Generation


def verify_welcome(welcome: Welcome, invite: Invite, me: PeerId) -> Membership:
    """SignatureError or AdmissionError when it is not what the invite leads to."""
    manifest = open_manifest(
        decode_envelope(welcome.manifest, "the coordinator's manifest"), invite.organiser
    )
    if run_id_of(manifest) != invite.run_id:
        raise SignatureError(
            "the coordinator shows another run than the invite names; ask for a new invite"
        )
    membership = Membership(
        invite.run_id, invite.organiser, welcome.certificate, manifest, welcome.generation
    )
    _check(membership, me)
    return membership


def renew_certificate(membership: Membership, certificate: str, me: PeerId) -> Membership:
    """With the coordinator's newer certificate. ProtocolError when that one does not hold."""
    newer = replace(membership, certificate=certificate)
    try:
        _check(newer, me)
    except AdmissionError as error:
        # The one that is held still counts: attach again for another, or for the reason.
        raise ProtocolError(f"the coordinator's new certificate fails: {error}") from error
    return newer


def _check(membership: Membership, me: PeerId) -> None:
    envelope = decode_envelope(membership.certificate, "the coordinator's certificate")
    check_certificate(envelope, membership.run, membership.organiser, time.time(), me)
