"""Admission of peers to the run, and their membership certificates.

Owns the decision at a hello (run, ban, token or list) and the life of certificates. What
the organiser has decided is in `swarm_coordinator.admission.book`; the organiser's key signs; the
content and verification of a certificate are in `swarm_shared.identity.credentials`. Why it is done
this way: docs/decisions/0010-admission.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swarm_coordinator.admission.book import (
    AdmissionBook,
    AdmissionMode,
    AdmissionRecord,
    MemberAdmitted,
)
from swarm_coordinator.admission.device_owners import DeviceOwners, named_owner
from swarm_shared.base.clock import Clock
from swarm_shared.base.errors import AdmissionError, StorageError
from swarm_shared.base.types import Generation, PeerId, RunId
from swarm_shared.identity.credentials import (
    CLOCK_SKEW_SECONDS,
    MembershipCertificate,
    Role,
)
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import encode_envelope
from swarm_shared.protocol import Hello

CERTIFICATE_SECONDS = 24 * 3600.0
"""Lifetime of a certificate. While the coordinator is unavailable, members trust a peer for the
rest of this time."""

RENEW_AFTER_SECONDS = CERTIFICATE_SECONDS / 3
"""Age at which a certificate is renewed: members keep at least two thirds of its lifetime when the
coordinator is lost."""

REVOKED_SECONDS = CERTIFICATE_SECONDS + CLOCK_SKEW_SECONDS
"""Seconds after a peer's last certificate within which it could still present a valid one."""

WriteRecord = Callable[[AdmissionRecord], Awaitable[None]]
"""Returns when the record is durable."""


@dataclass(frozen=True, slots=True)
class AdmissionAuthority:
    """The admission rules of one start of the coordinator."""

    organiser: Identity
    run: RunId
    generation: Generation
    mode: AdmissionMode
    book: AdmissionBook
    write: WriteRecord
    clock: Clock
    owners: DeviceOwners

    async def admit(self, peer: PeerId, hello: Hello) -> str:
        """Return a certificate for `peer` in base64, after recording durably the use of a token.

        ProtocolError: an invalid owner binding. AdmissionError: the hello names another run, or the
        rules of this one refuse the peer. `peer` must come from the connection.
        """
        self.check_run(hello.run)
        owner = named_owner(peer, hello.owner)
        banned = self._owner_refusal(owner)
        if banned is not None:
            raise AdmissionError(banned)
        refusal = self.refusal(peer)
        if refusal is not None:
            if self.mode != "token" or peer in self.book.bans:
                raise AdmissionError(refusal)
            await self._use_token(peer, hello.token)
        self.owners.enter(peer, owner)
        return self.certificate(peer, "volunteer")

    def check_run(self, run: RunId) -> None:
        """Raise AdmissionError for another run than this one."""
        if run != self.run:
            raise AdmissionError(
                f"this coordinator serves run {self.run[:12]}, not {run[:12]}; "
                f"ask the organiser for a new invite"
            )

    def refusal(self, peer: PeerId) -> str | None:
        """Why this peer may not, or no longer, take part; None if it may."""
        if peer == self.organiser.peer_id:
            return None  # the coordinator itself is exempt
        owner = self.owners.of(peer)
        return self._owner_refusal(owner) or self.book.refusal(self.mode, peer)

    def _owner_refusal(self, owner: PeerId | None) -> str | None:
        """Why no device of this owner may take part; None if they may."""
        ban = None if owner is None else self.book.bans.get(owner)
        return None if ban is None else f"the owner of this device is banned: {ban.reason}"

    async def _use_token(self, peer: PeerId, secret: str | None) -> None:
        token = self.book.usable_token(secret, self.clock())
        record = MemberAdmitted(peer, token.token)
        # Before it is durable: two concurrent hellos must not both get the last use.
        self.book.enter(record, self.clock())
        try:
            await self.write(record)
        except StorageError:
            self.book.withdraw(record)
            raise

    def certificate(self, peer: PeerId, role: Role) -> str:
        """Issue a certificate that is valid from now."""
        now = self.clock()
        certificate = MembershipCertificate(
            peer=peer, run=self.run, generation=self.generation, not_before=now,
            expires=now + CERTIFICATE_SECONDS, role=role,
        )  # fmt: skip
        return encode_envelope(certificate.sign(self.organiser))
