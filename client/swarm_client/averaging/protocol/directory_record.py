"""A member's record in hivemind's DHT: its form, and the check of its signatures.

A record is accepted wherever the DHT stores it, for its signatures alone: it is signed by the
peer's own key and contains a membership certificate of the run.
"""

from __future__ import annotations

from swarm_shared.base.errors import AdmissionError, FrameError, SignatureError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import PeerId, RunId, UnixSeconds
from swarm_shared.identity.credentials import check_certificate
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import decode_envelope, open_message, sign_message
from swarm_shared.protocol import PeerRecord

DIRECTORY_DOMAIN = "swarmtrain-directory-1"
MAX_RECORD_BYTES = 32 * 1024
"""Longest signed record."""


class DirectoryRecord(FrozenModel):
    """A member's roster record in the directory, which the member signs."""

    record: PeerRecord
    expires: UnixSeconds


def sign_record(identity: Identity, record: PeerRecord, expires: float) -> bytes:
    return sign_message(identity, DirectoryRecord(record=record, expires=expires), DIRECTORY_DOMAIN)


def open_record(value: bytes, run: RunId, organiser: PeerId, now: float) -> PeerRecord:
    """Return a member's record that it has signed itself. AdmissionError, FrameError or
    SignatureError otherwise."""
    message, signer = open_message(
        value, DirectoryRecord, DIRECTORY_DOMAIN, max_bytes=MAX_RECORD_BYTES
    )
    if signer != message.record.peer:
        raise SignatureError(f"{signer} signed the record of {message.record.peer}")
    if message.expires < now:
        raise SignatureError(f"the record of {signer} has expired")
    envelope = decode_envelope(message.record.certificate)
    check_certificate(envelope, run, organiser, now, signer)
    return message.record


def is_record_of(subkey: object, value: object, run: RunId, organiser: PeerId, now: float) -> bool:
    """Whether an entry is the record of the member that its subkey names. Each member has one."""
    if not isinstance(subkey, str) or not isinstance(value, bytes):
        return False
    try:
        return open_record(value, run, organiser, now).peer == subkey
    except (AdmissionError, FrameError, SignatureError):
        return False
