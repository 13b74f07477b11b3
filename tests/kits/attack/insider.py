"""An attacker that the run has let in: it has a certificate and knows where everybody is."""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

import trio

from kits.memory import offers
from kits.transcripts import TRANSCRIPT
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.types import PeerId, StageIndex, Version
from swarm_shared.identity.credentials import (
    MembershipCertificate,
    Receipt,
)
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signed_manifest import open_manifest
from swarm_shared.network import FramedStream, FrameLimits, Node, open_node
from swarm_shared.protocol import (
    CONTROL_PROTOCOL,
    MAX_LEAVES_ASKED,
    SOFTWARE_VERSION,
    STAGE_PROTOCOL,
    TRANSFER_PROTOCOL,
    ChunkRequest,
    CoordinatorMessage,
    Forward,
    Heartbeat,
    Hello,
    LeafRequest,
    PeerRecord,
    Ready,
    Receipts,
    Refused,
    Roster,
    StageHello,
    StageRefused,
    TransferHello,
    TransferRefused,
    WantedLeaf,
    Welcome,
    coordinator_messages,
    encode,
    parse,
    stage_answers,
    transfer_messages,
)
from swarm_shared.run.manifest import Manifest

LIMITS = FrameLimits(max_header_bytes=32 * 2**20, max_payload_bytes=64 * 2**20)
TOKEN_BYTES = 4
ANSWER_SECONDS = 20.0
"""Time limit of an answer that is due, on a machine shared with the attack."""
SILENCE_SECONDS = 3.0
"""Wait for an answer to a lie. None is due where the victim waits for the rest of what was
promised."""
PATIENCE_SECONDS = 5.0
"""Wait for the end of a session that the coordinator has a reason to end."""


@dataclass
class Insider:
    """Attached as a volunteer that wants no stage."""

    invite: Invite
    node: Node
    identity: Identity
    stream: FramedStream
    certificate: str
    manifest: Manifest
    roster: tuple[PeerRecord, ...] = ()
    heard: list[CoordinatorMessage] = field(default_factory=list)
    knows: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)
    """Set when the coordinator has ended the session."""

    async def listen(self) -> None:
        with suppress(SwarmError):
            while True:
                message = parse(coordinator_messages, (await self.stream.receive()).header)
                self.heard.append(message)
                if isinstance(message, Roster):
                    self.roster = message.peers
                    self.knows.set()
        self.ended.set()

    async def beat(self) -> None:
        with suppress(SwarmError):
            while True:
                await self.stream.send(encode(Heartbeat(microbatches_per_second=0.0, queued=0)))
                await trio.sleep(1)

    def victim(self, stage: int) -> PeerRecord:
        return next(record for record in self.roster if record.stage == stage)

    def forged(self, **changes: object) -> dict[str, str]:
        """Certificates that are none: each is wrong in one way."""
        now = time.time()
        right = {
            "peer": self.identity.peer_id, "run": self.invite.run_id, "generation": 1,
            "not_before": now - 10, "expires": now + 3600, "role": "volunteer",
        }  # fmt: skip
        forger = Identity.generate()

        def signed_by(signer: Identity, **wrong: object) -> str:
            certificate = MembershipCertificate(**{**right, **wrong, **changes})  # type: ignore[arg-type]
            return base64.b64encode(certificate.sign(signer)).decode()

        return {
            "signed by oneself": signed_by(self.identity),
            "signed by somebody": signed_by(forger),
            "of another run": signed_by(forger, run="cd" * 32),
            "expired": signed_by(forger, expires=now - 3600),
            "somebody else's": next(r.certificate for r in self.roster),
            "not base64": "é" * 40,
            "empty": "",
            "half": self.certificate[: len(self.certificate) // 2],
        }

    # ---- the stage protocol

    @asynccontextmanager
    async def edge(
        self, peer: PeerId, protocol: str, hello: bytes, addresses: tuple[str, ...] = ()
    ) -> AsyncIterator[FramedStream]:
        """A stream with its greeting said. It ends with the block: the few streams that one
        without a certificate may have are not to be what it is turned away for."""
        stream = await self.node.open_stream(peer, protocol, LIMITS, addresses)
        try:
            await stream.send(hello)
            yield stream
        finally:
            with trio.CancelScope(shield=True):
                await stream.reset()

    def stage_edge(
        self, record: PeerRecord, certificate: str | None = None
    ) -> AbstractAsyncContextManager[FramedStream]:
        shown = self.certificate if certificate is None else certificate
        hello = encode(StageHello(run=self.invite.run_id, certificate=shown))
        return self.edge(record.peer, STAGE_PROTOCOL, hello, (*record.addresses, *record.local))

    def transfer_edge(
        self, peer: PeerId, addresses: tuple[str, ...] = (), certificate: str | None = None
    ) -> AbstractAsyncContextManager[FramedStream]:
        shown = self.certificate if certificate is None else certificate
        hello = encode(TransferHello(run=self.invite.run_id, certificate=shown))
        return self.edge(peer, TRANSFER_PROTOCOL, hello, addresses)

    async def is_turned_away(self, record: PeerRecord, certificate: str) -> bool:
        """At the stage protocol and at transfers."""
        async with self.stage_edge(record, certificate) as stream:
            answer = parse(stage_answers, (await stream.receive(20)).header)
        if not isinstance(answer, StageRefused):
            return False
        async with self.transfer_edge(
            record.peer, (*record.addresses, *record.local), certificate
        ) as stream:
            refused = parse(transfer_messages, (await stream.receive(20)).header)
        return isinstance(refused, TransferRefused)

    def forward(self, stage: int, **changes: object) -> tuple[bytes, bytes]:
        """A microbatch of the step that is under way, in the right form, with made-up content."""
        tokens = self.manifest.tokens_per_microbatch
        width = 1 if stage == 0 else self.manifest.model.hidden_size
        size = tokens * width * 4
        message = Forward(
            request=1, step=1, microbatch=0, stage=stage, accumulate=(0, 1), input_bytes=size,
            target_bytes=tokens * TOKEN_BYTES, ticket="",
        )  # fmt: skip
        return encode(message.model_copy(update=changes)), bytes(size + tokens * TOKEN_BYTES)

    async def push_work(self, stage: int, steps: Iterable[int]) -> list[str]:
        """Right in form, for every step and microbatch; the kinds of answers that came."""
        async with self.stage_edge(self.victim(stage)) as stream:
            answers = [parse(stage_answers, (await stream.receive(20)).header).kind]
            for request, step in enumerate(steps):
                header, payload = self.forward(stage, request=request, step=step)
                await stream.send(header, payload)
                answers.append(parse(stage_answers, (await stream.receive(20)).header).kind)
        return answers

    async def lie_about_sizes(self, stage: int) -> dict[str, str]:
        """The outcome of each lie: the kind of the answer, `closed`, or `silence` where the victim
        waits for the rest. Each on a link of its own, for it is the last thing said there."""
        right, payload = self.forward(stage)
        size = len(payload)
        lies: dict[str, tuple[bytes, bytes]] = {
            "no input": (self.forward(stage, input_bytes=0)[0], payload),
            "endless input": (self.forward(stage, input_bytes=2**52)[0], payload),
            "all target": (self.forward(stage, target_bytes=size)[0], payload),
            "a byte less": (right, payload[:-1]),
            "no payload": (right, b""),
            "a byte more": (right, payload + b"x"),
            "an empty message": (b"{}", b""),
            "a deep message": (b"[" * 10_000, b""),
            "no text": (b"\xff" * 100, b""),
            "half a message": (right[:-1], payload),
        }
        outcomes: dict[str, str] = {}
        for name, (header, content) in lies.items():
            async with self.stage_edge(self.victim(stage)) as stream:
                await stream.receive(ANSWER_SECONDS)
                await stream.send(header, content, timeout_seconds=ANSWER_SECONDS)
                outcomes[name] = await _outcome(stream)
        prefixes = {
            "an endless header": struct.pack(">IQ", 2**32 - 1, 0),
            "an endless payload": struct.pack(">IQ", 10, 2**63),
            "half a prefix": b"\x00" * 5,
            "half a payload": struct.pack(">IQ", len(right), size) + right + payload[:100],
        }
        for name, prefix in prefixes.items():
            async with self.stage_edge(self.victim(stage)) as stream:
                await stream.receive(ANSWER_SECONDS)
                await stream._stream.write(prefix)
                await stream._stream.close()
                outcomes[name] = await _outcome(stream)
        return outcomes

    # ---- the coordinator

    async def babble(self, content: bytes, payload: bytes = b"") -> str:
        """Attach anew and send this; return `refused` with the kind of error, or `closed` without
        one, when the coordinator ends the session for it, and `ignored` when the session goes
        on."""
        async with attached(self.invite) as other, trio.open_nursery() as nursery:
            nursery.start_soon(other.beat)
            await other.stream.send(content, payload)
            with trio.move_on_after(PATIENCE_SECONDS):
                await other.ended.wait()
            nursery.cancel_scope.cancel()
        if not other.ended.is_set():
            return "ignored"
        codes = [message.code for message in other.heard if isinstance(message, Refused)]
        return f"refused: {codes[0]}" if codes else "closed"

    def receipt(self, signer: Identity, **changes: object) -> str:
        values = {
            "run": self.invite.run_id, "generation": 1, "step": 1, "microbatch": 0, "stage": 0,
            "peer": signer.peer_id, "samples": self.manifest.training.sequences_per_microbatch,
            "tokens": self.manifest.tokens_per_microbatch, "loss_sum": None,
            "transcript": TRANSCRIPT, **changes,
        }  # fmt: skip
        receipt = Receipt(**values)  # type: ignore[arg-type]
        return base64.b64encode(receipt.sign(signer)).decode()

    async def claim(self, stage: int, version: int) -> None:
        """Say that the stage is held at this version, and sign all microbatches of its step."""
        numbers = range(self.manifest.training.microbatches_per_step)
        signed = tuple(
            self.receipt(
                self.identity, step=version + 1, microbatch=number, stage=stage,
                loss_sum=0.008 if stage == self.manifest.stage_count - 1 else None,
            )
            for number in numbers
        )  # fmt: skip
        ready = Ready(stage=StageIndex(stage), version=Version(version), digest="0" * 32)
        await self.stream.send(encode(ready))
        await self.stream.send(encode(Receipts(receipts=signed)))

    async def ask_and_never_read(self, seconds: float) -> int:
        """Leaves of the data, on as many streams as can be had; how many of them were served."""
        streams: list[FramedStream] = []
        same = (WantedLeaf(shard=0, leaf=0),) * MAX_LEAVES_ASKED
        request = encode(LeafRequest(leaves=same, content=True))
        async with AsyncExitStack() as stack:
            with trio.move_on_after(seconds):
                for _ in range(100):
                    with suppress(SwarmError):
                        edge = self.transfer_edge(self.invite.coordinator)
                        streams.append(await stack.enter_async_context(edge))
                        for _ in range(50):
                            await streams[-1].send(request, timeout_seconds=1)
                await trio.sleep_forever()
            served = 0
            for stream in streams:
                with suppress(SwarmError):
                    await stream.receive(1)
                    served += 1
        return served

    async def fetch(self, item: str) -> bytes | None:
        """The first bytes of a file at the coordinator; None when it is refused."""
        async with self.transfer_edge(self.invite.coordinator) as stream:
            await stream.send(encode(ChunkRequest(item=item, offset=0, bytes=100)))
            try:
                frame = await stream.receive(20)
            except SwarmError:
                return None
            refused = isinstance(parse(transfer_messages, frame.header), TransferRefused)
            return None if refused else bytes(frame.payload)


@asynccontextmanager
async def attached(invite: Invite, **claims: object) -> AsyncIterator[Insider]:
    """`claims`: fields of the hello, which claims nothing otherwise."""
    identity = Identity.generate()
    async with open_node(identity) as node:
        stream = await node.open_stream(
            invite.coordinator, CONTROL_PROTOCOL, LIMITS, invite.addresses
        )
        hello = Hello(
            run=invite.run_id, software=SOFTWARE_VERSION, token=invite.token, addresses=(),
            device="none", memory=offers(1),
        )  # fmt: skip
        await stream.send(encode(hello.model_copy(update=claims)))
        welcome = parse(coordinator_messages, (await stream.receive(20)).header)
        assert isinstance(welcome, Welcome)
        manifest = open_manifest(base64.b64decode(welcome.manifest), invite.organiser)
        insider = Insider(invite, node, identity, stream, welcome.certificate, manifest)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(insider.listen)
            yield insider
            nursery.cancel_scope.cancel()


async def _outcome(stream: FramedStream) -> str:
    """The kind of the next answer, `closed`, or `silence`."""
    answer = "silence"
    with trio.move_on_after(SILENCE_SECONDS):
        try:
            answer = parse(stage_answers, (await stream.receive()).header).kind
        except SwarmError:
            answer = "closed"
    return answer
