"""Admission while the coordinator serves: renews certificates and carries out admission commands.

Owns the timing: when a certificate is due, which events the core gets after a change, and the
sentence that the organiser reads. Not here: the rules (`admission.book`) and the requests
(`admission.requests`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from swarm_coordinator.admission.authority import REVOKED_SECONDS, AdmissionAuthority
from swarm_coordinator.admission.book import MAX_TEXT_CHARACTERS, PeerBanned
from swarm_coordinator.admission.requests import (
    AdmissionChange,
    Request,
    admission_status,
    carry_out,
    parse_request,
    standing_token,
)
from swarm_coordinator.core.events import (
    Broadcast,
    CertificateIssued,
    Command,
    Event,
    PeersReinstated,
    PeersRevoked,
    Send,
)
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.server import admin_socket
from swarm_coordinator.server.sessions import ClientSessions
from swarm_coordinator.status.document import AdmissionStatus
from swarm_coordinator.storage.admission_rows import read_seen_since
from swarm_coordinator.storage.records import PeerSeen
from swarm_coordinator.storage.store import Store
from swarm_shared.base.clock import Clock
from swarm_shared.base.errors import AdmissionError, StorageError, SwarmError
from swarm_shared.base.text import excerpt
from swarm_shared.base.types import PeerId
from swarm_shared.protocol import Refused, Roster, TransferHello
from swarm_shared.transfer.transfer import CheckRemote, certificate_check

log = logging.getLogger(__name__)

RENEWAL_CHECK_SECONDS = 30.0
"""Seconds between checks for due certificates. A timer alone fails when a machine sleeps or its
clock is set."""

CarryOut = Callable[[Event], Awaitable[Sequence[Command]]]
"""Passes an event to the core; returns its commands once all are carried out."""


@dataclass(slots=True, eq=False)
class AdmissionService:
    """Admission during one start of the coordinator."""

    folder: RunFolder
    admission: AdmissionAuthority
    store: Store
    sessions: ClientSessions
    carry_out: CarryOut
    clock: Clock
    renew_after_seconds: float
    _lock: trio.Lock = field(default_factory=trio.Lock)

    async def standing_token(self) -> str | None:
        """The secret of the run's own invite, stored if it is new; None without one."""
        if self.admission.mode != "token":
            return None
        secret, record = standing_token(self.folder, self.admission.book)
        if record is not None:
            await self.store.write(record)
            self.admission.book.enter(record, self.admission.clock())
        return secret

    def revoked_at_start(self) -> dict[PeerId, float]:
        """Peers that were admitted lately and are refused now, with the time until which the core
        announces that.

        Covers changes made while no coordinator ran, and another mode in run.toml.
        """
        now, wall_now = self.clock(), self.admission.clock()
        since = wall_now - REVOKED_SECONDS
        last_seen_by_peer = self.store.read(lambda connection: read_seen_since(connection, since))
        return {
            peer: now + last_seen + REVOKED_SECONDS - wall_now
            for peer, last_seen in last_seen_by_peer.items()
            if self.admission.refusal(peer) is not None
        }

    def transfer_check(self) -> CheckRemote:
        """The check of transfer requests: a valid certificate, and not refused by the rules now."""
        admission = self.admission
        holds = certificate_check(admission.run, admission.organiser.peer_id, admission.clock)

        def check(remote: PeerId, hello: TransferHello) -> None:
            holds(remote, hello)
            refusal = admission.refusal(remote)
            if refusal is not None:
                raise AdmissionError(refusal)

        return check

    def status(self) -> AdmissionStatus:
        admission = self.admission
        return admission_status(
            admission.book, admission.mode, admission.clock(), self.sessions.attached
        )

    # ------------------------------------------------------------ commands

    async def serve_commands(self, report: Callable[[str], None]) -> None:
        """Answer commands like `ban` until cancelled."""
        try:
            await admin_socket.serve(self.folder.socket, self.answer)
        except StorageError as error:
            report(f"commands like `ban` reach this coordinator only after its end: {error}")

    async def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Carry out a command of the admin socket; an error becomes part of the answer."""
        try:
            change, effect = await self._carry_out(parse_request(question))
        except SwarmError as error:
            return {"ok": False, "error": str(error), "exit_code": error.exit_code}
        return change.answer(effect)

    async def ban(self, owner: PeerId, reason: str, devices: Sequence[PeerId]) -> None:
        """Ban an owner by the run's own rules, with its attached devices. UsageError for the
        organiser's own key."""
        await self._carry_out(
            PeerBanned(owner, excerpt(reason, MAX_TEXT_CHARACTERS)), (owner, *devices)
        )

    async def _carry_out(
        self, request: Request, others: Sequence[PeerId] = ()
    ) -> tuple[AdmissionChange, str]:
        """Execute a request that concerns `others` too. Returns the change, and its effects as a
        sentence."""
        admission = self.admission
        async with self._lock:
            change, concerned = await carry_out(
                request, self.folder, admission.mode, admission.organiser.peer_id, admission.book,
                self.store.write, admission.clock,
            )  # fmt: skip
            return change, await self._apply_to_core(dict.fromkeys((*concerned, *others)))

    async def _apply_to_core(self, peers: Iterable[PeerId]) -> str:
        """Pass the change to the core. Returns the effects as a sentence."""
        refused: dict[str, list[PeerId]] = {}
        welcome: list[PeerId] = []
        for peer in peers:
            reason = self.admission.refusal(peer)
            if reason is None:
                welcome.append(peer)
            else:
                refused.setdefault(reason, []).append(peer)
        commands: list[Command] = []
        if welcome:
            commands += await self.carry_out(PeersReinstated(tuple(welcome)))
        until = self.clock() + REVOKED_SECONDS
        for reason, named in refused.items():
            commands += await self.carry_out(PeersRevoked(tuple(named), reason, until))
        sent = [command for command in commands if isinstance(command, Send)]
        ended = sum(isinstance(command.message, Refused) for command in sent)
        notified = {command.peer for command in sent if isinstance(command.message, Roster)}
        notified |= {peer for c in commands if isinstance(c, Broadcast) for peer in c.peers}
        parts = [f"{_counted(ended, 'session was', 'sessions were')} ended"] if ended else []
        if refused:
            parts.append(f"{_counted(len(notified), 'volunteer was', 'volunteers were')} notified")
        return ", ".join(parts)

    # ------------------------------------------------------------ certificates

    async def renew_certificates(self) -> None:
        """Renew the certificates of the members and of the coordinator in time, until cancelled."""
        admission, own = self.admission, self.admission.organiser.peer_id
        own_since = admission.clock()
        pause = min(RENEWAL_CHECK_SECONDS, self.renew_after_seconds / 2)
        while True:
            await trio.sleep(pause)
            if self._needs_renewal(own_since):
                own_since = admission.clock()
                certificate = admission.certificate(own, "coordinator")
                await self.carry_out(CertificateIssued(own, certificate))
            for session in self.sessions.current():
                if self._needs_renewal(session.certified_at):
                    session.certified_at = admission.clock()
                    certificate = admission.certificate(session.peer, "volunteer")
                    # Records that its certificate is this new, in case it is revoked.
                    self.store.post(PeerSeen(session.peer))
                    await self.carry_out(CertificateIssued(session.peer, certificate))

    def _needs_renewal(self, certified_at: float) -> bool:
        """Whether a certificate is due for renewal, or not valid yet because the clock was set
        back."""
        return not 0 <= self.admission.clock() - certified_at < self.renew_after_seconds


def _counted(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"
