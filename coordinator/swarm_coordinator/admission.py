"""Who is let into the run, and the certificate that says so.

Owns the decision (software, run, token) and the certificate's life. The organiser's key signs;
what a certificate holds and how it is checked is in `swarm_shared.credentials`.
"""

from __future__ import annotations

import base64
import hmac
from dataclasses import dataclass

from swarm_shared.clock import Clock, wall
from swarm_shared.credentials import MembershipCertificate, Role, sign_certificate
from swarm_shared.errors import AdmissionError, ProtocolError, VersionError
from swarm_shared.identity import Identity
from swarm_shared.messages import SOFTWARE_VERSION, Hello
from swarm_shared.types import Generation, PeerId, RunId

CERTIFICATE_SECONDS = 24 * 3600.0
"""A peer that is not let in again is without a valid certificate after a day at most."""

RENEW_AFTER_SECONDS = 0.75 * CERTIFICATE_SECONDS
"""A session of this age is ended, so that its client says Hello again and gets a new one."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The rules of one start of the coordinator. `token` None: everybody may take part."""

    organiser: Identity
    run: RunId
    generation: Generation
    token: str | None = None
    clock: Clock = wall

    def admit(self, peer: PeerId, hello: Hello) -> str:
        """A certificate for `peer` in base64.

        ProtocolError: it wants another run. VersionError: its software does not fit.
        AdmissionError: it lacks the token. `peer` must come from the connection.
        """
        if hello.run != self.run:
            raise ProtocolError(
                f"this coordinator serves run {self.run[:12]}, not {hello.run[:12]}; "
                f"ask the organiser for a new invite"
            )
        if not compatible(hello.software, SOFTWARE_VERSION):
            raise VersionError(
                f"this run needs swarmtrain {SOFTWARE_VERSION}, and this machine has "
                f"{hello.software}; install {SOFTWARE_VERSION} and join again"
            )
        if self.token is not None and not _equal(self.token, hello.token or ""):
            raise AdmissionError(
                "this run is by invitation and the invite's token is not the right one; "
                "ask the organiser for a new invite"
            )
        return self.certificate(peer, "volunteer")

    def certificate(self, peer: PeerId, role: Role) -> str:
        now = self.clock()
        certificate = MembershipCertificate(
            peer=peer, run=self.run, generation=self.generation, not_before=now,
            expires=now + CERTIFICATE_SECONDS, role=role,
        )  # fmt: skip
        return base64.b64encode(sign_certificate(self.organiser, certificate)).decode("ascii")


def compatible(theirs: str, ours: str) -> bool:
    """Before 1.0 the minor version may change the protocol, afterwards the major one only."""

    def key(version: str) -> tuple[str, ...]:
        parts = version.split(".")
        return tuple(parts[:2]) if parts[0] == "0" else (parts[0],)

    return key(theirs) == key(ours)


def _equal(one: str, other: str) -> bool:
    # In constant time, so that a token cannot be guessed character by character.
    return hmac.compare_digest(one.encode(), other.encode())
