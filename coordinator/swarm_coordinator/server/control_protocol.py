"""CONTROL_PROTOCOL at the coordinator: turns a client's frames into events for the core.

Owns the hello (version, run, admission), the check of every receipt's signature, and the rule that
an invalid message ends only the session that sent it. Decides nothing about the run.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Literal

import trio

from swarm_coordinator.admission.authority import AdmissionAuthority
from swarm_coordinator.admission.device_owners import named_owner
from swarm_coordinator.core.events import (
    AuditAnswered,
    Event,
    LeaseResolved,
    MessageReceived,
    PeerAttached,
    PeerHeartbeat,
    ReceiptsVerified,
    SessionLost,
    SessionNumber,
    SumsStated,
    VerdictRecord,
)
from swarm_coordinator.server.core_failures import RefusedForNow
from swarm_coordinator.server.event_queue import EventQueue
from swarm_coordinator.server.sessions import ClientSession, ClientSessions
from swarm_shared.addresses.announced import PeerPlace
from swarm_shared.base.errors import (
    AdmissionError,
    NetworkError,
    ProtocolError,
    SignatureError,
    SwarmError,
    VersionError,
)
from swarm_shared.base.rate_limit import RateLimit
from swarm_shared.base.types import (
    MAX_PEERS,
    MicrobatchIndex,
    PeerId,
    RunId,
    StageIndex,
    Step,
)
from swarm_shared.identity.credentials import Receipt, open_carrier_binding
from swarm_shared.identity.signing import decode_envelope
from swarm_shared.identity.work_statements import AuditStatement, SumStatement
from swarm_shared.network import FramedStream, FrameLimits
from swarm_shared.probe.address_proof import AddressProof
from swarm_shared.protocol import (
    AddressUpdate,
    AuditResult,
    ClientMessage,
    Heartbeat,
    Hello,
    LeaseResult,
    Receipts,
    Refused,
    SumsChecked,
    client_messages,
    encode,
    parse,
)
from swarm_shared.protocol.versions import check_versions
from swarm_shared.run.manifest import Manifest
from swarm_shared.trust.votes import Claim

log = logging.getLogger(__name__)

HELLO_SECONDS = 10.0
"""Seconds for a new connection to send its hello."""

REFUSAL_FLUSH_SECONDS = 2.0
"""Seconds for the reason of a refusal to be sent before the session ends."""

_LARGE_BYTES = 4096
"""Length of a message above which the next one of its session is read only when the core has
handled it: thousands may wait for the core, each with some five times the memory of its length."""

ATTACH_BURST = 30.0
ATTACHES_PER_SECOND = 0.2
"""Attachments of one peer: a burst for a link that breaks again and again, and a rate over the long
run. Each of them has rows in the database and a line on the organiser's terminal."""

_RECEIPT_BYTES = 1024
"""Bytes allowed for a receipt; its envelope has about 700 characters."""
_NON_RECEIPT_BYTES = 256 * 1024
"""Bytes allowed for everything in a message but receipts: 4096 link counts have at most 600 kB in
theory and 100 kB in practice."""

_RECEIPTS_PER_TURN = 8
"""Signatures verified before other tasks run: about a millisecond of work."""
_KNOWN_PER_TURN = 256
"""Receipts that need no verification and are looked at before other tasks run."""
_SIGNED_PER_MICROBATCH = 8
"""Receipts of one microbatch and one step that are verified of one peer. It signs another one when
it has computed the microbatch again, from another input."""
_STEPS_REMEMBERED = 2
"""Steps before and after the newest one whose verified receipts are kept."""
_MAX_COUNTED_ENVELOPES = 50_000
"""Envelopes of counted receipts kept as evidence: about 50 MB, and several steps of a large run."""
_MAX_OTHER_ENVELOPES = 10_000
"""Envelopes kept of receipts that have not counted yet. A peer can sign any number of these, and
must not push out what it lied in."""


def most_microbatches(manifest: Manifest) -> int:
    """The microbatches of a step or of the evaluation, whichever are more."""
    training = manifest.training
    return max(training.microbatches_per_step, training.evaluation_microbatches)


def control_limits(manifest: Manifest) -> FrameLimits:
    """Limits of one message: what a client can make the coordinator buffer before its hello."""
    receipts = max(most_microbatches(manifest), manifest.stage_count)
    return FrameLimits(max_header_bytes=_NON_RECEIPT_BYTES + receipts * _RECEIPT_BYTES)


_Claimed = tuple[Step, MicrobatchIndex, StageIndex, PeerId, Claim]
"""A cell, its peer, and what the peer claims of it."""


def _claimed_by(receipt: Receipt) -> _Claimed:
    claim = Claim(receipt.transcript, receipt.loss_sum)
    return receipt.step, receipt.microbatch, receipt.stage, receipt.peer, claim


class ReceiptChecker:
    """Verifies receipts, each one once however often it is reported, and of those that could count
    only as many as an honest peer signs: a signature costs more than all else."""

    def __init__(
        self,
        run: RunId,
        may_count: Callable[[PeerId, Receipt], bool],
        most_microbatches: int,
    ) -> None:
        """`may_count`: whether a receipt that a peer reports could count, by what it claims."""
        self._run = run
        self._may_count = may_count
        self._most_signed = _SIGNED_PER_MICROBATCH * most_microbatches
        self._verified: dict[Step, dict[bytes, Receipt]] = {}
        self._signed: dict[Step, Counter[PeerId]] = {}
        """Number of verified receipts of each step that each peer has signed."""
        self._turns = trio.Lock()
        self._counted: OrderedDict[_Claimed, str] = OrderedDict()
        self._others: OrderedDict[_Claimed, str] = OrderedDict()

    async def check(self, envelopes: Sequence[str], sender: PeerId) -> tuple[Receipt, ...]:
        """Return those of a peer's receipts that may count; ProtocolError when one of them is
        invalid."""
        receipts: list[Receipt] = []
        work = 0
        for envelope in envelopes:
            key = blake2b(envelope.encode(), digest_size=16).digest()
            receipt = None
            for verified in self._verified.values():
                if key in verified:
                    receipt = verified[key]
            if receipt is None:
                receipt = self._verify(envelope, sender)
                if receipt is not None:
                    self._remember(key, receipt)
                    self._keep(receipt, envelope)
                    work += _KNOWN_PER_TURN // _RECEIPTS_PER_TURN
            if receipt is not None:
                receipts.append(receipt)
            work += 1
            if work >= _KNOWN_PER_TURN:
                work = 0
                async with self._turns:  # all who have many take one turn after the other
                    await trio.lowlevel.checkpoint()
        return tuple(receipts)

    def _remember(self, key: bytes, receipt: Receipt) -> None:
        step = receipt.step
        if step not in self._verified:
            for old_step in list(self._verified):
                if abs(old_step - step) > _STEPS_REMEMBERED:
                    del self._verified[old_step], self._signed[old_step]
            self._verified[step], self._signed[step] = {}, Counter()
        self._verified[step][key] = receipt
        self._signed[step][receipt.peer] += 1

    def _keep(self, receipt: Receipt, envelope: str) -> None:
        self._others[_claimed_by(receipt)] = envelope
        if len(self._others) > _MAX_OTHER_ENVELOPES:
            self._others.popitem(last=False)

    def counted(self, receipt: Receipt) -> None:
        """Keep the envelope of a receipt that has counted."""
        key = _claimed_by(receipt)
        envelope = self._others.pop(key, None)
        if envelope is not None:
            self._counted[key] = envelope
            if len(self._counted) > _MAX_COUNTED_ENVELOPES:
                self._counted.popitem(last=False)

    def envelope(self, verdict: VerdictRecord) -> str:
        """The signed receipt that a verdict is about, as evidence; empty if it is no longer kept.

        The receipt is found by its claim: the peer may have signed another one of the same cell
        since.
        """
        if verdict.claim is None or verdict.microbatch is None:
            return ""
        cell = (verdict.step, verdict.microbatch, verdict.stage, verdict.audited, verdict.claim)
        return self._counted.get(cell) or self._others.get(cell, "")

    def _verify(self, envelope: str, sender: PeerId) -> Receipt | None:
        """Return a valid receipt; None if it could not count, or its signer has signed too many."""

        def is_wanted(claimed: Receipt) -> bool:
            if claimed.run != self._run:
                raise SignatureError(f"a receipt is of run {claimed.run[:12]}, not of this one")
            signed = self._signed.get(claimed.step)
            if signed is not None and signed[claimed.peer] >= self._most_signed:
                return False
            return self._may_count(sender, claimed)

        return Receipt.open_wanted(decode_envelope(envelope, "a receipt"), is_wanted)


def _beat(session: ClientSession, message: Heartbeat) -> PeerHeartbeat:
    """The heartbeat for the core, without the link reports, which are recorded already: any number
    of heartbeats may wait for the core."""
    if message.changed_links or message.changed_paths or message.lost_paths:
        message = message.model_copy(
            update={"changed_links": (), "changed_paths": (), "lost_paths": ()}
        )
    return PeerHeartbeat(session.number, session.peer, message)


@dataclass(slots=True, eq=False)
class ControlServer:
    """Serves the control streams of all clients."""

    admission: AdmissionAuthority
    sessions: ClientSessions
    queue: EventQueue
    on_heartbeat: Callable[[SessionNumber, PeerId, Heartbeat], None]
    proof: AddressProof
    check_core_failures: Callable[[PeerId], None]
    """Raises RefusedForNow for a peer on whose event the core has failed."""
    receipts: ReceiptChecker
    ended: Counter[str] = field(default_factory=Counter)
    """Sessions that ended without a goodbye, by reason."""
    _attaches: RateLimit = field(
        default_factory=lambda: RateLimit(ATTACH_BURST, ATTACHES_PER_SECOND, MAX_PEERS)
    )

    async def handle(self, stream: FramedStream) -> None:
        """Serve one client's stream from its hello to its end."""
        frame = await stream.receive(timeout_seconds=HELLO_SECONDS)
        try:
            check_versions(frame.header)
            hello = parse(client_messages, frame.header)
            if not isinstance(hello, Hello):
                raise ProtocolError(f"the first message must be hello, not {hello.kind}")
            self.check_core_failures(stream.remote)
            if wait_seconds := self._attaches.take(stream.remote):
                raise RefusedForNow("this peer attaches again and again", wait_seconds)
            certified_at = self.admission.clock()
            certificate = await self.admission.admit(stream.remote, hello)
            receipts = await self.receipts.check(hello.receipts, stream.remote)
            owner = self.admission.owners.of(stream.remote)
            if owner != named_owner(stream.remote, hello.owner):
                # A verdict would name one owner, with the binding of the other as evidence.
                raise ProtocolError("another hello of this peer has named another owner since")
        except (AdmissionError, VersionError, ProtocolError) as error:
            await self._refuse(stream, error)
            return
        session = self.sessions.open(stream.remote, stream, certified_at, hello.instance)
        session.place = self.proof.place(stream.remote_address)
        announced = self._checked(session.peer, hello.announced, session.place)
        proven = announced.model_dump(exclude={"kind", "carrier"}) | {"carrier": announced.carrier}
        checked = hello.model_copy(update=proven)
        attached = PeerAttached(session.number, session.peer, checked, certificate, receipts, owner)
        try:
            with session.scope:
                await self.queue.put(attached)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(session.write_all)
                    nursery.start_soon(self._prove, session, hello.announced)
                    await self._read(session, nursery)
                    nursery.cancel_scope.cancel()
        finally:
            session.written.set()
            self.sessions.ended(session)
            # The core needs the event, unless the coordinator ends itself.
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                await self.queue.put(SessionLost(session.number, session.peer))

    async def _refuse(self, stream: FramedStream, error: SwarmError) -> None:
        code: Literal["admission", "version", "protocol"] = "protocol"
        if isinstance(error, AdmissionError):
            code = "admission"
        elif isinstance(error, VersionError):
            code = "version"
        self.ended[f"refused: {code}"] += 1
        log.info("%s was refused: %s", stream.remote, error)
        retry_seconds = error.retry_seconds if isinstance(error, RefusedForNow) else None
        refused = Refused(code=code, reason=str(error)[:500], retry_seconds=retry_seconds)
        await stream.send(encode(refused), timeout_seconds=HELLO_SECONDS)

    async def _prove(self, session: ClientSession, announced: AddressUpdate) -> None:
        """Dial back the announced addresses that the session does not prove, and pass on an
        announcement with those that answered."""
        proven = await self.proof.dialled_back(session.peer, announced, session.place)
        if not proven <= session.place.dialled_back:
            session.place = replace(session.place, dialled_back=proven | session.place.dialled_back)
            await self.queue.put(self._announcement(session, announced))

    def _announcement(self, session: ClientSession, announced: AddressUpdate) -> Event:
        checked = self._checked(session.peer, announced, session.place)
        return MessageReceived(session.number, session.peer, checked)

    def _checked(self, peer: PeerId, announced: AddressUpdate, place: PeerPlace) -> AddressUpdate:
        """The announcement as other members may see it, with a p2pd only if the peer has signed
        that it is its own: relays serve a p2pd as they serve its member."""
        checked, carrier = self.proof.checked(announced, place), announced.carrier
        if carrier is None:
            return checked
        try:
            envelope = decode_envelope(carrier.binding, "a carrier binding")
            bound = open_carrier_binding(envelope, peer, self.admission.clock())
            if bound.carrier_peer_id == carrier.peer:
                return checked
            reason = f"its binding is of {bound.carrier_peer_id}"
        except ProtocolError as error:
            reason = str(error)
        log.info("the p2pd %s that %s names does not count: %s", carrier.peer, peer, reason)
        return checked.model_copy(update={"carrier": None})

    async def _read(self, session: ClientSession, nursery: trio.Nursery) -> None:
        """Receive messages until the stream ends or the client violates the protocol."""
        try:
            while True:
                frame = await session.stream.receive()
                message = parse(client_messages, frame.header)
                if isinstance(message, Heartbeat):
                    self.on_heartbeat(session.number, session.peer, message)
                    await self.queue.put_heartbeat(_beat(session, message))
                    continue
                if isinstance(message, AddressUpdate):
                    event = self._announcement(session, message)
                    nursery.start_soon(self._prove, session, message)
                else:
                    event = await self._event(session, message)
                if len(frame.header) > _LARGE_BYTES:
                    await self.queue.put_and_wait(event)
                else:
                    await self.queue.put(event)
        except NetworkError as error:
            log.info("session %d with %s ended: %s", session.number, session.peer, error)
            self.ended["link closed"] += 1
        except ProtocolError as error:
            log.warning("session %d with %s ends: %s", session.number, session.peer, error)
            self.ended["protocol error"] += 1
            # The volunteer's log should have the reason; SessionLost then ends the core's part.
            session.send(encode(Refused(code="protocol", reason=str(error)[:500])))
            session.finish()
            with trio.move_on_after(REFUSAL_FLUSH_SECONDS):
                await session.written.wait()

    async def _event(self, session: ClientSession, message: ClientMessage) -> Event:
        if isinstance(message, Hello):
            raise ProtocolError("the client sent a second hello on one stream")
        if isinstance(message, Receipts):
            receipts = await self.receipts.check(message.receipts, session.peer)
            return ReceiptsVerified(session.number, session.peer, receipts)
        if isinstance(message, LeaseResult):
            return LeaseResolved(
                session.number, session.peer, message.step, message.microbatch, message.lease,
                message.ok, message.reason,
                await self.receipts.check(message.receipts, session.peer), message.owing,
            )  # fmt: skip
        if isinstance(message, AuditResult):
            return self._audited(session, message)
        if isinstance(message, SumsChecked):
            return self._stated(session, message)
        return MessageReceived(session.number, session.peer, message)

    def _audited(self, session: ClientSession, message: AuditResult) -> AuditAnswered:
        """The answer of an auditor; ProtocolError for a statement that is not its own."""
        statement = None
        if message.statement is not None:
            statement = AuditStatement.open(decode_envelope(message.statement, "an audit"))
            if statement.run != self.admission.run or statement.auditor != session.peer:
                raise SignatureError(
                    f"{session.peer} sent an audit of {statement.auditor} in run "
                    f"{statement.run[:12]}; it must sign its own, of this run"
                )
        return AuditAnswered(
            session.number, session.peer, message.audit, statement, message.statement or ""
        )

    def _stated(self, session: ClientSession, message: SumsChecked) -> SumsStated:
        """A member's sums; ProtocolError for a statement of another one or of another attempt."""
        envelope = decode_envelope(message.statement, "a statement of sums")
        statement = SumStatement.open(envelope, session.peer)
        if (statement.run, statement.step, statement.attempt) != (
            self.admission.run, message.step, message.attempt,
        ):  # fmt: skip
            raise SignatureError(
                f"{session.peer} sent sums of attempt {statement.attempt} of step "
                f"{statement.step} in run {statement.run[:12]} as those of attempt "
                f"{message.attempt} of step {message.step} of this run"
            )
        return SumsStated(
            session.number, session.peer, message.attempt, message.details, statement,
            message.statement,
        )  # fmt: skip
