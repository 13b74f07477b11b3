"""The probe pass: the organiser's permission for a peer to ask volunteers for probes, nothing more.

A machine that is checked before joining is no member yet, so it has no certificate; the
coordinator, which has checked its invite, gives it this pass instead. It is accepted on
DOCTOR_PROTOCOL alone.
"""

from __future__ import annotations

from swarm_shared.base.errors import AdmissionError, FrameError, SignatureError
from swarm_shared.base.types import PeerId, RunId, UnixSeconds
from swarm_shared.identity.credentials import CLOCK_SKEW_SECONDS
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import SignedMessage, decode_envelope, encode_envelope

PASS_SECONDS = 300.0
"""Validity of a pass. A check takes half a minute; a daemon gets a new pass with each."""


class ProbePass(SignedMessage):
    domain = "swarmtrain-visitor-1"

    peer: PeerId
    run: RunId
    expires: UnixSeconds


def sign_probe_pass(organiser: Identity, peer: PeerId, run: RunId, now: float) -> str:
    """Return a signed pass in base64, as it is sent."""
    value = ProbePass(peer=peer, run=run, expires=now + PASS_SECONDS)
    return encode_envelope(value.sign(organiser))


def check_probe_pass(
    text: str, run: RunId, organiser: PeerId, now: float, remote_peer: PeerId
) -> None:
    """Raise AdmissionError unless the pass is for `remote_peer`, which must come from the
    connection."""
    try:
        value = ProbePass.open(decode_envelope(text), organiser)
    except (FrameError, SignatureError) as error:
        raise AdmissionError(f"{remote_peer} shows no pass of this run: {error}") from error
    if value.run != run or value.peer != remote_peer:
        raise AdmissionError(f"{remote_peer} shows the pass of another run or peer")
    if now > value.expires + CLOCK_SKEW_SECONDS:
        raise AdmissionError(f"the pass of {remote_peer} has expired; ask the coordinator again")
