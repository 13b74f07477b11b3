"""DOCTOR_PROTOCOL, client side: one probe session with the coordinator or a volunteer.

async with open_probe(node, peer, hello, addresses) as probe:
    probe.welcome.observed_address
    await probe.echo()
    await probe.dial_back(["/ip4/192.0.2.1/tcp/4001"])
    await probe.upload_rate()
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from swarm_shared.base.clock import Clock, wall
from swarm_shared.base.errors import AdmissionError, LinkTimeout, NetworkError, ProtocolError
from swarm_shared.base.types import PeerId
from swarm_shared.network import FramedStream, FrameLimits, Node
from swarm_shared.protocol import (
    DOCTOR_PROTOCOL,
    MAX_CANDIDATES,
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
    doctor_answers,
    encode,
    parse,
)

CLIENT_LIMITS = FrameLimits(max_header_bytes=64 * 1024, max_payload_bytes=RATE_CHUNK_BYTES)

ANSWER_SECONDS = 5.0
DIAL_BACK_SECONDS = 6.0
"""Longest wait for dial-backs: the server gives each dial three seconds, and they run side by
side."""
ECHOES = 5

BURST_BYTES = tuple(kib * 1024 for kib in (32, 128, 512, 2048, 4096))
"""Sizes of the bursts. Each measures a fast link better than the one before; together they stay
below MAX_RATE_BYTES."""
ENOUGH_SECONDS = 0.4
"""Duration from which a burst is a sufficient measurement; the next one would take four times as
long."""
RATE_SECONDS = 6.0

_CHUNK = bytes(RATE_CHUNK_BYTES)


class ProbeBusy(NetworkError):
    """The server answers another client at this moment, or was asked too often."""

    def __init__(self, reason: str, retry_after_seconds: float) -> None:
        super().__init__(reason)
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True, slots=True)
class EchoTimes:
    """The quickest of several echoes: the one that waited least on its way."""

    rtt_seconds: float
    clock_ahead_seconds: float
    """Lead of this machine's clock over the server's; wrong by half the round trip at most."""


@asynccontextmanager
async def open_probe(
    node: Node, peer: PeerId, hello: DoctorHello, addresses: Sequence[str] = ()
) -> AsyncIterator[Probe]:
    """Open a probe session with `peer`.

    NetworkError when it cannot be reached, AdmissionError when it does not answer this client,
    ProbeBusy when it has no capacity.
    """
    stream = await node.open_stream(peer, DOCTOR_PROTOCOL, CLIENT_LIMITS, addresses)
    async with stream:
        await stream.send(encode(hello), timeout_seconds=ANSWER_SECONDS)
        frame = await stream.receive(timeout_seconds=ANSWER_SECONDS)
        answer = parse(doctor_answers, frame.header)
        if isinstance(answer, DoctorRefused):
            raise _refusal(answer)
        if not isinstance(answer, DoctorWelcome):
            raise ProtocolError(f"{peer} answered a probe's hello with {answer.kind}")
        yield Probe(stream, answer)


class Probe:
    """An open session: one request at a time. Each raises ProbeBusy when it is refused for now."""

    def __init__(self, stream: FramedStream, welcome: DoctorWelcome) -> None:
        self.welcome = welcome
        self.peer = stream.remote
        self._stream = stream

    async def echo(self, wall_clock: Clock = wall) -> EchoTimes:
        best: EchoTimes | None = None
        for number in range(ECHOES):
            sent, wall_sent = time.monotonic(), wall_clock()
            await self._send(Echo(number=number))
            answer, _ = await self._receive(ANSWER_SECONDS)
            rtt_seconds = time.monotonic() - sent
            if not isinstance(answer, EchoAnswer) or answer.number != number:
                raise ProtocolError(f"{self.peer} answered an echo with {answer.kind}")
            # Both clocks in the middle of the round trip.
            ahead = wall_sent + rtt_seconds / 2 - answer.unix_seconds
            if best is None or rtt_seconds < best.rtt_seconds:
                best = EchoTimes(rtt_seconds, ahead)
        assert best is not None
        return best

    async def dial_back(self, addresses: Sequence[str]) -> tuple[DialBackResult, ...]:
        """Return whether an unknown peer reaches this node at each of these, in their order."""
        await self._send(DialBack(addresses=tuple(addresses[:MAX_CANDIDATES])))
        answer, _ = await self._receive(DIAL_BACK_SECONDS)
        if not isinstance(answer, DialBackAnswer):
            raise ProtocolError(f"{self.peer} answered a request to dial back with {answer.kind}")
        if [result.address for result in answer.results] != list(addresses[:MAX_CANDIDATES]):
            raise ProtocolError(f"{self.peer} dialled other addresses than it was asked to")
        return answer.results

    async def upload_rate(self, rtt_seconds: float = 0.0) -> float:
        """Measure bytes per second to the server. LinkTimeout when hardly any arrive."""
        return await self._rate(self._upload, rtt_seconds)

    async def download_rate(self, rtt_seconds: float = 0.0) -> float:
        """Measure bytes per second from the server. LinkTimeout when hardly any arrive."""
        return await self._rate(self._download, rtt_seconds)

    async def _rate(self, burst: Callable[[int], Awaitable[None]], rtt_seconds: float) -> float:
        """Return the best of bursts that grow until one takes long enough to be trusted.

        A burst and the answer to it travel a round trip, which is no part of the rate.
        """
        best = 0.0
        with trio.move_on_after(RATE_SECONDS):
            for count in BURST_BYTES:
                begun = time.monotonic()
                await burst(count)
                seconds = time.monotonic() - begun
                best = max(best, count / max(seconds - rtt_seconds, seconds / 10))
                if seconds >= ENOUGH_SECONDS:
                    break
        if not best:
            raise LinkTimeout(
                f"{BURST_BYTES[0] // 1024} KiB took more than {RATE_SECONDS:g} s between this "
                f"machine and {self.peer}"
            )
        return best

    async def _upload(self, count: int) -> None:
        left = count
        while left:
            size = min(left, RATE_CHUNK_BYTES)
            left -= size
            await self._send(Upload(more=left > 0), _CHUNK[:size])
        answer, _ = await self._receive(RATE_SECONDS)
        if not isinstance(answer, UploadAnswer) or answer.bytes != count:
            raise ProtocolError(f"{self.peer} answered an upload of {count} bytes wrongly")

    async def _download(self, count: int) -> None:
        await self._send(Download(bytes=count))
        received = 0
        while received < count:
            answer, payload_bytes = await self._receive(RATE_SECONDS)
            if not isinstance(answer, DownloadChunk):
                raise ProtocolError(f"{self.peer} answered a download with {answer.kind}")
            received += payload_bytes
        if received != count:
            raise ProtocolError(f"{self.peer} sent {received} bytes instead of {count}")

    async def _send(self, message: DoctorRequest, payload: bytes = b"") -> None:
        await self._stream.send(encode(message), payload)

    async def _receive(self, timeout_seconds: float) -> tuple[DoctorAnswer, int]:
        frame = await self._stream.receive(timeout_seconds=timeout_seconds)
        answer = parse(doctor_answers, frame.header)
        if isinstance(answer, DoctorRefused):
            raise _refusal(answer)
        return answer, len(frame.payload)


def _refusal(answer: DoctorRefused) -> NetworkError | AdmissionError:
    if answer.code == "admission":
        return AdmissionError(answer.reason)
    return ProbeBusy(answer.reason, answer.retry_after_seconds)
