"""Who is let into the run, and the certificate that says so.

Owns the decision at a hello (software, run, ban, token or list) and the certificates' life. What
the organiser has decided is in `admission_book`; the organiser's key signs; what a certificate
holds and how it is checked is in `swarm_shared.identity.credentials`. Why it is done this way:
docs/decisions/0010-admission.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from swarm_coordinator.admission.book import (
    AdmissionBook,
    AdmissionMode,
    AdmissionRecord,
    MemberAdmitted,
)
from swarm_coordinator.admission.device_owners import DeviceOwners, named_owner
from swarm_shared.base.clock import Clock, wall
from swarm_shared.base.errors import AdmissionError, ProtocolError, StorageError, VersionError
from swarm_shared.base.types import Generation, PeerId, RunId
from swarm_shared.identity.credentials import (
    CLOCK_SKEW_SECONDS,
    MembershipCertificate,
    Role,
    sign_certificate,
)
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import encode_envelope
from swarm_shared.protocol import SOFTWARE_VERSION, Hello

CERTIFICATE_SECONDS = 24 * 3600.0
"""A peer whose coordinator is away stays believable to the others for the rest of this time."""

RENEW_AFTER_SECONDS = CERTIFICATE_SECONDS / 3
"""Members have at least two thirds of the time above before them when the coordinator is lost."""

REVOKED_SECONDS = CERTIFICATE_SECONDS + CLOCK_SKEW_SECONDS
"""So long after its last certificate a peer could still show one that has not expired."""

WriteRecord = Callable[[AdmissionRecord], Awaitable[None]]
"""Returns when the record is durable."""


async def _discard(_: AdmissionRecord) -> None:
    """For an admission that nobody will remember."""


@dataclass(frozen=True, slots=True)
class AdmissionAuthority:
    """The rules of one start of the coordinator."""

    organiser: Identity
    run: RunId
    generation: Generation
    mode: AdmissionMode = "open"
    book: AdmissionBook = field(default_factory=AdmissionBook)
    write: WriteRecord = _discard
    clock: Clock = wall
    owners: DeviceOwners = field(default_factory=DeviceOwners)

    async def admit(self, peer: PeerId, hello: Hello) -> str:
        """A certificate for `peer` in base64; a token that it used is marked before, durably.

        ProtocolError: it wants another run, or shows a binding to an owner that does not hold.
        VersionError: its software does not fit. AdmissionError: the rules of the run keep it out.
        `peer` must come from the connection.
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
        owner = named_owner(peer, hello.owner)
        refusal = self.refusal(peer)
        if refusal is not None:
            if self.mode != "token" or peer in self.book.bans:
                raise AdmissionError(refusal)
            await self._use_token(peer, hello.token)
        self.owners.enter(peer, owner)
        return self.certificate(peer, "volunteer")

    def refusal(self, peer: PeerId) -> str | None:
        """Why this peer may not take part any more, or not yet; None when it may."""
        if peer == self.organiser.peer_id:
            return None  # the coordinator itself, which no rule is about
        return self.book.refusal(self.mode, peer)

    async def _use_token(self, peer: PeerId, secret: str | None) -> None:
        token = self.book.usable_token(secret, self.clock())
        record = MemberAdmitted(peer, token.token)
        # Before it is durable: two peers at the same moment must not both have the last use.
        self.book.enter(record, self.clock())
        try:
            await self.write(record)
        except StorageError:
            self.book.withdraw(record)
            raise

    def certificate(self, peer: PeerId, role: Role) -> str:
        now = self.clock()
        certificate = MembershipCertificate(
            peer=peer, run=self.run, generation=self.generation, not_before=now,
            expires=now + CERTIFICATE_SECONDS, role=role,
        )  # fmt: skip
        return encode_envelope(sign_certificate(self.organiser, certificate))


def compatible(theirs: str, ours: str) -> bool:
    """Before 1.0 the minor version may change the protocol, afterwards the major one only."""

    def key(version: str) -> tuple[str, ...]:
        parts = version.split(".")
        return tuple(parts[:2]) if parts[0] == "0" else (parts[0],)

    return key(theirs) == key(ours)
