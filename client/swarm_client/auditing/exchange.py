"""AUDIT_PROTOCOL at both ends: the tensors of a microbatch, from an audited peer or a neighbour of
it to its auditor."""

from __future__ import annotations

import itertools
import logging
from functools import partial
from pathlib import Path

import trio

from swarm_client.auditing.permits import PermitCheck
from swarm_client.membership.member_context import MemberContext
from swarm_client.pipeline.pipeline import Pipeline
from swarm_client.stage.protocol.errors import RequestFailed
from swarm_shared.base.errors import (
    AdmissionError,
    NetworkError,
    ProtocolError,
    SwarmError,
)
from swarm_shared.base.transcript import KeptTensors
from swarm_shared.base.types import PeerId
from swarm_shared.network import FramedStream, FrameLimits
from swarm_shared.protocol import (
    AUDIT_PROTOCOL,
    PART_BYTES,
    KeptPart,
    KeptRequest,
    PeerRecord,
    TransferHello,
    TransferRefused,
    audit_messages,
    encode,
    parse,
)
from swarm_shared.transfer.places import Places

log = logging.getLogger(__name__)

SERVING_LIMITS = FrameLimits(max_header_bytes=16 * 1024, max_payload_bytes=0)
FETCHING_LIMITS = FrameLimits(max_header_bytes=4 * 1024, max_payload_bytes=PART_BYTES)

HELLO_SECONDS = 10.0
PART_SECONDS = 30.0
"""Longest time for one part of 1 MiB, as in a transfer."""
COMPUTING_SECONDS = 120.0
"""Longest time for the first part: a microbatch may have to be computed again for it."""
TURN_SECONDS = 60.0
"""Longest time of a request while another one waits: half of what an auditor waits for the first
part."""
MAX_SERVED = 4
"""Requests served at a time; each has one file."""
MAX_STREAMS_PER_PEER = 4


class KeptServer:
    """Serves tensors of the held stage to auditors that the coordinator has sent."""

    def __init__(self, member: MemberContext, pipeline: Pipeline, folder: Path) -> None:
        self._member, self._pipeline, self._folder = member, pipeline, folder
        self._numbers = itertools.count()
        self._places = Places(MAX_SERVED, TURN_SECONDS)
        self._permits = PermitCheck(member)
        member.node.serve(
            AUDIT_PROTOCOL, self.handle, SERVING_LIMITS, max_streams_per_peer=MAX_STREAMS_PER_PEER
        )

    async def handle(self, stream: FramedStream) -> None:
        """Answer one request."""
        path = self._folder / f"kept-{next(self._numbers)}"
        try:
            request = await self._request(stream)
            await self._places.run(partial(self._serve, stream, request, path))
        except (NetworkError, ProtocolError):
            raise
        except (SwarmError, OSError) as error:
            await stream.send(
                encode(TransferRefused(reason=str(error)[:500])), timeout_seconds=HELLO_SECONDS
            )
        finally:
            path.unlink(missing_ok=True)

    async def _request(self, stream: FramedStream) -> KeptRequest:
        hello = parse(audit_messages, (await stream.receive(timeout_seconds=HELLO_SECONDS)).header)
        if not isinstance(hello, TransferHello):
            raise ProtocolError(f"{stream.remote} began an audit with {hello.kind}")
        self._member.gate.check_transfer(stream.remote, hello)
        request = parse(
            audit_messages, (await stream.receive(timeout_seconds=HELLO_SECONDS)).header
        )
        if not isinstance(request, KeptRequest):
            raise ProtocolError(f"{stream.remote} sent {request.kind} instead of a request")
        return request

    async def _serve(self, stream: FramedStream, request: KeptRequest, path: Path) -> bool:
        await self._write(stream.remote, request, path)
        await _send_file(stream, path)
        return True

    async def _write(self, remote: PeerId, request: KeptRequest, path: Path) -> None:
        permit, stage = self._permits.use(remote, request)
        holding = self._pipeline.holding
        if holding is None or holding.stage != stage:
            raise AdmissionError(f"this peer does not hold stage {stage}")
        try:
            await holding.worker.save_kept(
                permit.step, permit.microbatch, path, request.tensors, request.blocks
            )
        except RequestFailed as error:
            if error.code == "not_repeatable":
                is_audited = request.tensors is KeptTensors.COMPUTED
                lost = ", so that nothing of this step counts" if is_audited else ""
                self._member.report(
                    f"{error}{lost}; `swarm-client doctor --self-test` tests this machine"
                )
            raise


async def _send_file(stream: FramedStream, path: Path) -> None:
    offset = 0
    async with await trio.open_file(path, "rb") as file:
        while part := await file.read(PART_BYTES):
            await stream.send(encode(KeptPart(offset=offset)), part, timeout_seconds=PART_SECONDS)
            offset += len(part)


async def fetch_kept(
    member: MemberContext, holder: PeerRecord, request: KeptRequest, total_bytes: int, path: Path
) -> None:
    """Fetch the tensors of a microbatch into a file of exactly this size.

    NetworkError, AdmissionError or ProtocolError when their holder does not give them.
    """
    own_membership = member.membership.now
    stream = await member.node.open_stream(
        holder.peer, AUDIT_PROTOCOL, FETCHING_LIMITS, holder.addresses
    )
    try:
        hello = TransferHello(run=own_membership.run, certificate=own_membership.certificate)
        await stream.send(encode(hello), timeout_seconds=HELLO_SECONDS)
        await stream.send(encode(request), timeout_seconds=HELLO_SECONDS)
        received, timeout_seconds = 0, COMPUTING_SECONDS
        async with await trio.open_file(path, "wb") as file:
            while received < total_bytes:
                frame = await stream.receive(timeout_seconds=timeout_seconds)
                message = parse(audit_messages, frame.header)
                if isinstance(message, TransferRefused):
                    raise AdmissionError(f"{holder.peer} refused: {message.reason}")
                size = len(frame.payload)
                if (
                    not isinstance(message, KeptPart)
                    or message.offset != received
                    or not 0 < size <= total_bytes - received
                ):
                    raise ProtocolError(f"{holder.peer} sent something else than was asked for")
                await file.write(frame.payload)
                received, timeout_seconds = received + size, PART_SECONDS
    finally:
        await stream.reset()
