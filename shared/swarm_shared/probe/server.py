"""DOCTOR_PROTOCOL, server side: time, version, echoes, rates, and dialling back.

Unadmitted clients may use it, so everything is bounded before anything is done: sessions at once,
sessions of one peer and of one address, requests of a session, bytes, dials and seconds. It dials
only the address that the client's own connection comes from, so that it cannot be used to scan or
flood other machines.

Admission, and what a client learns about the run, is the caller's part (`AnswerHello`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import trio

from swarm_shared.base.clock import Clock, monotonic, wall
from swarm_shared.base.endpoint import Endpoint, IpAddress, address_group
from swarm_shared.base.errors import AdmissionError, LinkClosed, NetworkError, ProtocolError
from swarm_shared.base.rate_limit import RateLimit
from swarm_shared.base.types import PeerId, RunId
from swarm_shared.identity.probe_pass import check_probe_pass
from swarm_shared.network import FramedStream, FrameLimits, Node
from swarm_shared.network.libp2p.host import take_one
from swarm_shared.network.nat.dial_back import dial_back
from swarm_shared.protocol import (
    DOCTOR_PROTOCOL,
    MAX_RATE_BYTES,
    RATE_CHUNK_BYTES,
    DialBack,
    DialBackAnswer,
    DialBackResult,
    DoctorAnswer,
    DoctorHello,
    DoctorRefused,
    DoctorRequest,
    DoctorWelcome,
    Download,
    DownloadChunk,
    Echo,
    EchoAnswer,
    Upload,
    UploadAnswer,
    doctor_requests,
    encode,
    parse,
)

log = logging.getLogger(__name__)

SERVING_LIMITS = FrameLimits(max_header_bytes=32 * 1024, max_payload_bytes=RATE_CHUNK_BYTES)

HELLO_SECONDS = 5.0
IDLE_SECONDS = 10.0
SEND_SECONDS = 10.0
SESSION_SECONDS = 30.0
DIAL_SECONDS = 3.0
MAX_ECHOES = 32
MAX_REQUESTS = 512
"""Requests of one session: its whole allowance of bytes in chunks, and everything else."""
MAX_DIAL_REQUESTS = 3
"""The address as it is, as mapped, and one more try."""
RATE_COST = 4
"""Cost of a rate measurement against an address's allowance, in sessions."""


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """The resources of this machine for all clients together, and for each of them."""

    visits: int = 32
    sessions_per_address: int = 8
    """A household may have several volunteers."""
    measuring_sessions: int = 2
    """Measurements at once; more would measure each other, and take the link from the training."""
    dials: int = 16
    burst: float = 40.0
    """Sessions of one address at once: eight check-ups."""
    per_second: float = 1 / 3
    """Sessions of one address over the long run: four check-ups a minute, which with 16 MiB each is
    about 1 MB/s."""


AnswerHello = Callable[[PeerId, DoctorHello], DoctorWelcome]
"""Answers a hello, all but the observed address. Raises AdmissionError when this client is not
served at all."""

CheckMember = Callable[[PeerId, RunId, str], None]
"""Raises AdmissionError unless the certificate, in base64, is the peer's."""


def answer_members_only(
    run: RunId, organiser: PeerId, check_member: CheckMember, clock: Clock = wall
) -> AnswerHello:
    """Return a volunteer's `AnswerHello`: members of the run, and clients with a probe pass."""

    def judge(remote: PeerId, hello: DoctorHello) -> DoctorWelcome:
        if hello.run != run:
            raise AdmissionError(f"this peer serves run {run[:12]}, not {hello.run[:12]}")
        if hello.probe_pass is not None:
            check_probe_pass(hello.probe_pass, run, organiser, clock(), remote)
        elif hello.certificate is not None:
            check_member(remote, run, hello.certificate)
        else:
            raise AdmissionError("a volunteer answers members and clients with a probe pass only")
        return DoctorWelcome()

    return judge


def serve_probe(
    node: Node,
    judge: AnswerHello,
    limits: ProbeLimits | None = None,
    wall_clock: Clock = wall,
    clock: Clock = monotonic,
) -> ProbeServer:
    """Answer probes as long as the node lives."""
    server = ProbeServer(judge, limits or ProbeLimits(), wall_clock, clock)
    node.serve(DOCTOR_PROTOCOL, server.handle, SERVING_LIMITS, public=True)
    return server


def address_key(observed: IpAddress | None) -> str:
    """Return what counts as one requester. All clients behind relays count as one: their own
    addresses are not known."""
    return "relayed" if observed is None else address_group(str(observed))


def busy(reason: str, retry_after_seconds: float) -> DoctorRefused:
    return DoctorRefused(code="busy", reason=reason, retry_after_seconds=retry_after_seconds)


class ProbeServer:
    def __init__(
        self, judge: AnswerHello, limits: ProbeLimits, wall_clock: Clock, clock: Clock
    ) -> None:
        self.judge = judge
        self.limits = limits
        self.wall_clock = wall_clock
        self.rate_limit = RateLimit(limits.burst, limits.per_second, clock=clock)
        self.measuring = trio.Semaphore(limits.measuring_sessions)
        self.dialling = trio.Semaphore(limits.dials)
        self._active_peers: set[PeerId] = set()
        self._addresses: Counter[str] = Counter()

    async def handle(self, stream: FramedStream) -> None:
        """Handle one session, from its hello to its end."""
        address = stream.remote_address
        observed = None if address is None else Endpoint.parse(address)
        key = address_key(None if observed is None else observed.ip)
        refused = self._enter(stream.remote, key)
        if refused is not None:
            await stream.send(encode(refused), timeout_seconds=SEND_SECONDS)
            return
        try:
            with trio.move_on_after(SESSION_SECONDS) as scope:
                await _ProbeSession(self, stream, observed, key).run()
            if scope.cancelled_caught:
                log.info("the probe session of %s took too long", stream.remote)
        finally:
            self._active_peers.discard(stream.remote)
            take_one(self._addresses, key)

    def _enter(self, visitor: PeerId, key: str) -> DoctorRefused | None:
        limits = self.limits
        if visitor in self._active_peers:
            return busy("another probe session of this peer is open", 1.0)
        if len(self._active_peers) >= limits.visits:
            return busy(f"{limits.visits} probe sessions are open; try again", 2.0)
        if self._addresses[key] >= limits.sessions_per_address:
            return busy("too many probe sessions come from this address; try again", 2.0)
        wait_seconds = self.rate_limit.take(key)
        if wait_seconds:
            return busy("this address has asked too often; try again later", wait_seconds)
        self._active_peers.add(visitor)
        self._addresses[key] += 1
        return None


class _ProbeSession:
    """One client's requests, answered in order."""

    def __init__(
        self,
        server: ProbeServer,
        stream: FramedStream,
        observed: Endpoint | None,
        key: str,
    ) -> None:
        self._server = server
        self._stream = stream
        self._observed = observed
        self._key = key
        self._requests = 0
        self._echoes = 0
        self._dial_requests = 0
        self._measuring = False
        self._uploaded = 0
        self._burst = 0
        self._downloaded = 0

    async def run(self) -> None:
        if not await self._welcome():
            return
        try:
            while True:
                try:
                    frame = await self._stream.receive(timeout_seconds=IDLE_SECONDS)
                except LinkClosed:
                    return
                self._requests += 1
                if self._requests > MAX_REQUESTS:
                    raise ProtocolError(f"a session has at most {MAX_REQUESTS} requests")
                request = parse(doctor_requests, frame.header)
                if frame.payload and not isinstance(request, Upload):
                    raise ProtocolError(f"{request.kind} came with {len(frame.payload)} bytes")
                await self._answer(request, len(frame.payload))
        finally:
            if self._measuring:
                self._server.measuring.release()

    async def _welcome(self) -> bool:
        frame = await self._stream.receive(timeout_seconds=HELLO_SECONDS)
        hello = parse(doctor_requests, frame.header)
        if not isinstance(hello, DoctorHello):
            raise ProtocolError(f"{self._stream.remote} began a probe session with {hello.kind}")
        try:
            welcome = self._server.judge(self._stream.remote, hello)
        except AdmissionError as error:
            await self._send(DoctorRefused(code="admission", reason=str(error)[:500]))
            return False
        observed = self._observed.multiaddr if self._observed else None
        await self._send(welcome.model_copy(update={"observed_address": observed}))
        return True

    async def _answer(self, request: DoctorRequest, payload_bytes: int) -> None:
        match request:
            case Echo():
                self._echoes += 1
                if self._echoes > MAX_ECHOES:
                    raise ProtocolError(f"a session has at most {MAX_ECHOES} echoes")
                now = self._server.wall_clock()
                await self._send(EchoAnswer(number=request.number, unix_seconds=now))
            case DialBack():
                await self._dial_back(request)
            case Upload():
                await self._upload(request, payload_bytes)
            case Download():
                await self._download(request)
            case DoctorHello():
                raise ProtocolError("the client sent a second hello")

    async def _send(self, message: DoctorAnswer, payload: bytes = b"") -> None:
        await self._stream.send(encode(message), payload, timeout_seconds=SEND_SECONDS)

    # Dialling back

    async def _dial_back(self, request: DialBack) -> None:
        self._dial_requests += 1
        if self._dial_requests > MAX_DIAL_REQUESTS:
            raise ProtocolError(f"a session has at most {MAX_DIAL_REQUESTS} requests to dial back")
        wait_seconds = self._server.rate_limit.take(self._key)
        if wait_seconds:
            await self._send(busy("this address has asked too often", wait_seconds))
            return
        results: dict[int, DialBackResult] = {}

        async def dial(index: int, address: str) -> None:
            results[index] = await self._dial(address)

        async with trio.open_nursery() as nursery:
            for index, address in enumerate(request.addresses):
                nursery.start_soon(dial, index, address)
        await self._send(DialBackAnswer(results=tuple(results[index] for index in sorted(results))))

    async def _dial(self, address: str) -> DialBackResult:
        endpoint = Endpoint.parse(address)
        if endpoint is None:
            reason = "this is no address that can be dialled"
        elif self._observed is None:
            reason = "your connection comes through a relay, so that your address is not known"
        elif endpoint.ip != self._observed.ip:
            reason = f"only the address that you come from, {self._observed.ip}, is dialled"
        else:
            reason = await self._try(endpoint)
        return DialBackResult(address=address, reached=not reason, reason=reason[:500])

    async def _try(self, endpoint: Endpoint) -> str:
        """Return why the client is not reached there; empty when it is."""
        try:
            self._server.dialling.acquire_nowait()
        except trio.WouldBlock:
            return "too many addresses are being dialled at this moment; try again"
        try:
            await dial_back(endpoint.multiaddr, self._stream.remote, DIAL_SECONDS)
        except NetworkError as error:
            return str(error)
        finally:
            self._server.dialling.release()
        return ""

    # Rates

    def _may_measure(self) -> DoctorRefused | None:
        """Reserve one of the few measuring slots at a session's first measurement, until its
        end."""
        if self._measuring:
            return None
        wait_seconds = self._server.rate_limit.take(self._key, RATE_COST)
        if wait_seconds:
            return busy("this address has measured too often; try again later", wait_seconds)
        try:
            self._server.measuring.acquire_nowait()
        except trio.WouldBlock:
            return busy("other sessions are measuring at this moment; try again", 2.0)
        self._measuring = True
        return None

    async def _upload(self, request: Upload, payload_bytes: int) -> None:
        self._uploaded += payload_bytes
        if self._uploaded > MAX_RATE_BYTES:
            raise ProtocolError(f"a session uploads at most {MAX_RATE_BYTES} bytes")
        refused = self._may_measure()
        if refused is not None:
            await self._send(refused)
            return
        self._burst += payload_bytes
        if not request.more:
            await self._send(UploadAnswer(bytes=self._burst))
            self._burst = 0

    async def _download(self, request: Download) -> None:
        self._downloaded += request.bytes
        if self._downloaded > MAX_RATE_BYTES:
            raise ProtocolError(f"a session downloads at most {MAX_RATE_BYTES} bytes")
        refused = self._may_measure()
        if refused is not None:
            await self._send(refused)
            return
        left = request.bytes
        while left:
            size = min(left, RATE_CHUNK_BYTES)
            left -= size
            await self._send(DownloadChunk(), bytes(size))
