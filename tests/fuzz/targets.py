"""One function per decoder: bytes in, and nothing may come out but an error of its own kind.

Each has examples of what is right, from which those who try it start. A target may do more than
decode: what was taken must also come back when it is encoded, where there is only one spelling.
"""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import trio
from google.protobuf.message import Message
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.io.exceptions import IncompleteReadError
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Reservation, StopMessage
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as PeerMessage
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from libp2p.stream_muxer.exceptions import MuxedStreamEOF
from multiaddr import Multiaddr
from pydantic import TypeAdapter

from kits.memory import needs, offers, takes
from swarm_client.averaging.all_reduce import frames
from swarm_client.averaging.all_reduce.codec import (
    check_finite,
    decode_piece,
    exponent_is_valid,
    payload_bytes,
    payload_is_valid,
)
from swarm_client.averaging.all_reduce.errors import RoundFailure
from swarm_client.averaging.all_reduce.routes import Route
from swarm_client.averaging.protocol import bridge
from swarm_client.connectivity.port_mapping import gateway, nat_pmp, upnp
from swarm_shared import protocol
from swarm_shared.addresses.binary import unpack_address
from swarm_shared.addresses.dial_order import (
    Interfaces,
    circuit_addresses,
    circuits,
    direct_addresses,
)
from swarm_shared.base.endpoint import Endpoint
from swarm_shared.base.errors import (
    AdmissionError,
    FrameError,
    InviteError,
    NetworkError,
    ProtocolError,
    SwarmError,
    VersionError,
)
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import RunId
from swarm_shared.codecs.tensors import DTYPES, decode, encode
from swarm_shared.identity.credentials import (
    CarrierBinding,
    MembershipCertificate,
    Receipt,
    check_certificate,
    open_carrier_binding,
    open_owner_binding,
    sign_owner_binding,
)
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity, public_key_of
from swarm_shared.identity.probe_pass import check_probe_pass, sign_probe_pass
from swarm_shared.identity.signing import open_envelope, seal
from swarm_shared.network.libp2p import yamux
from swarm_shared.network.libp2p.yamux_frames import control_frame
from swarm_shared.network.nat.circuit import read_message
from swarm_shared.protocol import doctor
from swarm_shared.protocol.framing import PREFIX_BYTES, FrameDecoder, FrameLimits, encode_frame
from swarm_shared.protocol.versions import VersionRange, check_versions, version_refusal
from swarm_shared.run.codec_sizes import AVERAGE_CODECS, GRADIENT_CODECS, encoded_bytes
from swarm_shared.run.model_config import ComputeDtype

Decode = Callable[[bytes], None]

ORGANISER, PEER = Identity.from_seed(b"o" * 32), Identity.from_seed(b"p" * 32)
RUN = RunId("ab" * 32)
NOW = 1e9
ADDRESS = "/ip4/203.0.113.7/tcp/4001"
CIRCUIT = f"{ADDRESS}/p2p/{ORGANISER.peer_id}/p2p-circuit/p2p/{PEER.peer_id}"


@dataclass(frozen=True)
class Target:
    decode: Decode
    examples: tuple[bytes, ...]
    allowed: tuple[type[Exception], ...] = (ProtocolError,)
    words: tuple[bytes, ...] = field(default=())
    """Of which inputs are made, beside the examples."""

    def __call__(self, data: bytes) -> None:
        with suppress(*self.allowed):
            self.decode(data)


# ---------------------------------------------------------------- frames and messages

LIMITS = FrameLimits(max_header_bytes=200, max_payload_bytes=1000)


def decode_frames(data: bytes) -> None:
    """The first byte says how the rest is cut into pieces."""
    if not data:
        return
    size, rest = 1 + data[0], data[1:]
    decoder = FrameDecoder(LIMITS)
    whole: list[bytes] = []
    for start in range(0, len(rest), size):
        for frame in decoder.feed(rest[start : start + size]):
            assert len(frame.header) <= LIMITS.max_header_bytes
            assert len(frame.payload) <= LIMITS.max_payload_bytes
            whole += map(bytes, encode_frame(frame.header, frame.payload))
        assert decoder.missing_bytes <= PREFIX_BYTES + 1200
    assert rest.startswith(b"".join(whole))
    decoder.finish()


def parse_message(adapter: TypeAdapter[Any], data: bytes) -> None:
    message = protocol.parse(adapter, data)
    again = protocol.parse(adapter, protocol.encode(message))
    assert again == message


def head_of(adapter: TypeAdapter[Any], data: bytes) -> None:
    adapter.validate_json(data)


def encoded(*said: FrozenModel) -> tuple[bytes, ...]:
    return tuple(protocol.encode(one) for one in said)


# ---------------------------------------------------------------- tensors between stages

TENSOR_SHAPE = (1, 3, 86)
"""258 values: a block of 256 and a short one."""


def decode_tensor(data: bytes) -> None:
    """The first byte names the codec and the dtype."""
    if not data:
        return
    codec = GRADIENT_CODECS[data[0] % len(GRADIENT_CODECS)]
    dtype: ComputeDtype = "bfloat16" if data[0] >= 128 else "float32"
    tensor = decode(codec, data[1:], TENSOR_SHAPE, dtype)
    assert tensor.isfinite().all()
    assert tensor.dtype == DTYPES[dtype]
    again = bytearray(encoded_bytes(codec, tensor.numel(), dtype))
    encode(codec, tensor, memoryview(again))


def encoded_tensors() -> tuple[bytes, ...]:
    values = torch.linspace(-1.0, 2.0, 258).view(TENSOR_SHAPE)
    examples: list[bytes] = []
    for number, codec in enumerate(GRADIENT_CODECS):
        room = bytearray(encoded_bytes(codec, values.numel(), "float32"))
        encode(codec, values, memoryview(room))
        examples.append(bytes((number,)) + room)
    return tuple(examples)


# ---------------------------------------------------------------- libp2p's own messages


class Fed:
    """A stream that has these bytes and then ends."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self, n: int) -> bytes:
        if not self._data:
            raise MuxedStreamEOF("the end")
        some, self._data = self._data[:n], self._data[n:]
        return some


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Of something that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


def read_libp2p(kind: type[Message], data: bytes) -> None:
    message = run(read_message(Fed(data), kind))  # type: ignore[arg-type]
    for packed in (
        *getattr(message, "ObsAddrs", ()),
        *(message.reservation.addrs if isinstance(message, HopMessage) else ()),
    ):
        decode_packed_address(packed)


def delimited(message: Message) -> bytes:
    content: bytes = message.SerializeToString()
    assert len(content) < 128
    return bytes([len(content)]) + content


def decode_packed_address(data: bytes) -> None:
    text = unpack_address(data)
    if text is not None:
        assert len(text) <= 150
        assert text.count("/") == 4
        assert "/dns" in text or Multiaddr(text).to_bytes() == data


def judge_addresses(data: bytes) -> None:
    """What a roster may say of a peer's addresses: any text, a line each."""
    texts = data.decode(errors="replace").split("\n")
    here = Interfaces(
        (ipaddress.ip_network("192.168.1.0/24"),), frozenset({ipaddress.ip_address("192.168.1.2")})
    )
    assert set(direct_addresses(texts, here)) <= set(texts)
    for circuit in circuits(texts):
        public_key_of(circuit.relay)
    assert all(len(way) < 300 for way in circuit_addresses(PEER.peer_id, texts, 3))
    for text in texts:
        Endpoint.parse(text)


class FedChannel:
    """Stands in the place of the encrypted connection under a muxer."""

    is_initiator = False

    def __init__(self, data: bytes) -> None:
        self._messages = iter(pieces(data))
        self.written = 0

    async def read(self) -> bytes:
        await trio.lowlevel.checkpoint()
        for message in self._messages:
            return message
        raise IncompleteReadError("the end")

    async def write(self, sent: list[bytes]) -> None:
        self.written += sum(map(len, sent))

    async def close(self) -> None:
        pass


def pieces(data: bytes) -> Iterator[bytes]:
    """Not empty, each as long as its first byte says."""
    while data:
        size = 1 + data[0]
        yield data[1 : 1 + size] or b"\x00"
        data = data[1 + size :]


def run_muxer(data: bytes) -> None:
    trio.run(_run_muxer, data)


async def _run_muxer(data: bytes) -> None:
    channel, failures = FedChannel(data), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yamux, "NoiseChannel", lambda secured: channel)
        for about_the_channel in ("relay_of", "local_end_of"):
            patch.setattr(yamux, about_the_channel, lambda channel: None)
        # It logs what it did not expect, and goes on.
        patch.setattr(
            yamux.logger, "exception", lambda text, *values: failures.append(text % values)
        )
        connection = yamux.YamuxConnection(channel, ID.from_base58(PEER.peer_id), False)  # type: ignore[arg-type]
        await connection.start()
    assert failures == []
    assert connection.is_closed
    assert channel.written < 64 * len(data) + 1000


# ---------------------------------------------------------------- what is signed


def open_any_envelope(data: bytes) -> None:
    opened = open_envelope(data, "test")
    assert opened.signer == ORGANISER.peer_id
    assert seal(ORGANISER, "test", opened.payload_type, opened.payload) == data


def open_pass(data: bytes) -> None:
    text = data.decode(errors="replace")
    check_probe_pass(text, RUN, ORGANISER.peer_id, NOW, PEER.peer_id)


def decode_invite(data: bytes) -> None:
    text = data.decode(errors="replace")
    invite = Invite.decode(text)
    assert Invite.decode(invite.encode()) == invite


CERTIFICATE = MembershipCertificate(
        peer=PEER.peer_id, run=RUN, generation=1, not_before=NOW, expires=NOW + 60, role="volunteer"
    ).sign(ORGANISER)  # fmt: skip
RECEIPT = Receipt(
        run=RUN, generation=1, step=1, microbatch=2, stage=0, peer=PEER.peer_id, samples=4,
        tokens=8, loss_sum=1.5,
        transcript=Transcript(input="0" * 32, output="1" * 32, gradient="2" * 32),
    ).sign(PEER)  # fmt: skip
OWNED = sign_owner_binding(ORGANISER, PEER.peer_id)
BINDING = CarrierBinding(
    peer=PEER.peer_id, carrier_peer_id=ORGANISER.peer_id, expires=NOW + 60
).sign(PEER)
INVITE = Invite(
    coordinator=ORGANISER.peer_id, organiser=ORGANISER.peer_id, run_id=RUN,
    addresses=(ADDRESS, "/dns4/example.org/tcp/1"), token="token",
)  # fmt: skip


# ---------------------------------------------------------------- averaging and routers


def decode_greeting(data: bytes) -> None:
    hello = frames.StreamHello.decode(data)
    # The sixth byte means nothing.
    assert hello.encode() == data[:5] + b"\0" + data[6:]


def decode_averaging(data: bytes) -> None:
    if len(data) < frames.HEADER_BYTES:
        return
    header = frames.Header.decode(data[: frames.HEADER_BYTES])
    rest = data[frames.HEADER_BYTES :]
    if header.kind is frames.FrameKind.ABORT:
        abort = frames.Abort.decode(rest, members=3)
        assert abort.reason.isprintable()
        assert abort.culprit is None or abort.culprit < 3
    elif header.kind is frames.FrameKind.PIECE:
        for codec in AVERAGE_CODECS:
            if codec == "exact":
                elements, payload = header.piece % 2000, memoryview(rest)
            else:
                lengths = range(len(rest) + 1)
                elements = max(n for n in lengths if payload_bytes(n, codec) <= len(rest))
                payload = memoryview(rest)[: payload_bytes(elements, codec)]
            whole = elements > 0 and payload_is_valid(payload, elements, codec)
            if whole and exponent_is_valid(header.exponent, codec):
                piece = decode_piece(header.exponent, payload, codec, elements)
                assert piece.shape == (elements,)
                with suppress(SwarmError):
                    check_finite(piece)


def answer_of_router(data: bytes) -> None:
    for operation in nat_pmp.Operation:
        with suppress(FrameError, NetworkError):
            assert nat_pmp.parse_answer(data, operation) == data[8:]
            assert len(data) == (12 if operation is nat_pmp.Operation.EXTERNAL_ADDRESS else 16)
            assert data[:4] == bytes([0, 128 + operation, 0, 0])
    home = ipaddress.IPv4Address("192.168.1.1")
    url = upnp.description_url(data, home)
    assert url is None or upnp.is_at(url, home)
    text = data.decode(errors="replace")
    gateway.parse_linux_routes(text)
    gateway.parse_route_tool(text)


# ---------------------------------------------------------------- all of them

RECORD = protocol.PeerRecord(
    peer=PEER.peer_id, stage=0, addresses=(ADDRESS, CIRCUIT),
    certificate=base64.b64encode(CERTIFICATE).decode(), microbatches_per_second=1.5,
)  # fmt: skip
HOP = HopMessage(type=HopMessage.STATUS)
HOP.reservation.CopyFrom(Reservation(expire=1, addrs=[Multiaddr(ADDRESS).to_bytes()]))
STOP = StopMessage(
    type=StopMessage.CONNECT, peer=PeerMessage(id=ID.from_base58(PEER.peer_id).to_bytes())
)
PUNCH = HolePunch(type=HolePunch.CONNECT, ObsAddrs=[Multiaddr(ADDRESS).to_bytes()])
IDENTIFY = Identify(agent_version="a", observed_addr=Multiaddr(ADDRESS).to_bytes())
JSON_WORDS = (
    b'{"kind":"', b'":', b"null", b"true", b"[", b"]", b"{", b"}", b",", b"-1", b"1e999", b"NaN",
    b"Infinity", b"1.5", b'"', b"\\ud800", b"\\u0000", b"9" * 400, b"[" * 300, b"\xff",
)  # fmt: skip


def json_target(adapter: TypeAdapter[Any], *said: FrozenModel) -> Target:
    return Target(partial(parse_message, adapter), encoded(*said), (FrameError,), JSON_WORDS)


def read_versions(data: bytes) -> None:
    """What both sides read of a message of any version."""
    refusal = version_refusal(data)
    assert refusal is None or len(str(refusal)) <= 500
    check_versions(data)


TARGETS: dict[str, Target] = {
    "frames": Target(
        decode_frames,
        (b"\x03" + b"".join(map(bytes, encode_frame(b"head", b"payload"))), b"\xff" + bytes(24)),
    ),
    "client_messages": json_target(
        protocol.client_messages,
        protocol.Hello(
            run=RUN, software="0.1.0", addresses=(ADDRESS,), device="cpu", memory=offers(1)
        ),
        protocol.Heartbeat(microbatches_per_second=1.0, queued=1),
        protocol.RoundReport(step=1, attempt=1, ok=False, missing=(1, 2), culprit=PEER.peer_id),
        protocol.LeaseResult(step=1, microbatch=1, lease=1, ok=True, receipts=("AA==",)),
    ),
    "coordinator_messages": json_target(
        protocol.coordinator_messages,
        protocol.Roster(serial=1, peers=(RECORD,), revoked=(PEER.peer_id,)),
        protocol.Apply(step=1, attempt=1, global_norm=1.0, learning_rate=1e-3),
        protocol.Refused(code="admission", reason="no"),
    ),
    "hello_versions": Target(
        read_versions,
        encoded(
            protocol.Hello(
                run=RUN, software="9", protocols=VersionRange(oldest=1, newest=9),
                addresses=(ADDRESS,), device="cpu", memory=offers(1),
            ),
            protocol.Refused(code="version", reason="update"),
        ),
        (VersionError,),
        JSON_WORDS,
    ),
    "stage_requests": json_target(
        protocol.stage_requests,
        protocol.StageHello(run=RUN, certificate="AA=="),
        protocol.Forward(
            request=1, step=1, microbatch=1, stage=1, accumulate=(0, 1), input_bytes=16,
            target_bytes=16, ticket="AA==",
        ),
        protocol.StageCancel(request=1),
    ),
    "stage_answers": json_target(
        protocol.stage_answers,
        protocol.Backward(request=1, receipts=(), service_seconds=0.1, loss_sum=1.0, tokens=4),
        protocol.StageRefused(request=None, reason=protocol.RefusalReason.BUSY),
    ),
    "transfer_messages": json_target(
        protocol.transfer_messages,
        protocol.ChunkRequest(item="data", offset=0, bytes=1),
        protocol.ChunkAnswer(item="data", offset=0, item_bytes=1, sha256="a" * 64),
        protocol.LeafRequest(leaves=(protocol.WantedLeaf(shard=1, leaf=2),), content=True),
    ),
    "doctor_requests": json_target(
        doctor.doctor_requests,
        doctor.DialBack(addresses=(ADDRESS,)),
        doctor.Download(bytes=1),
    ),
    "doctor_answers": json_target(
        doctor.doctor_answers,
        doctor.DoctorWelcome(
            software="0.1.0", software_fits=True, smallest_stage=needs(takes(2**20))
        ),
        doctor.EchoAnswer(number=1, unix_seconds=NOW),
    ),
    "bridge_heads": Target(
        partial(head_of, bridge.arrivals),
        encoded(bridge.StreamArrived(sender=PEER.peer_id, route=Route.HOST)),
        (ValueError,),
        JSON_WORDS,
    ),
    "hop": Target(
        partial(read_libp2p, HopMessage), (delimited(HOP),), (FrameError, MuxedStreamEOF)
    ),
    "stop": Target(
        partial(read_libp2p, StopMessage), (delimited(STOP),), (FrameError, MuxedStreamEOF)
    ),
    "dcutr": Target(
        partial(read_libp2p, HolePunch), (delimited(PUNCH),), (FrameError, MuxedStreamEOF)
    ),
    "identify": Target(
        partial(read_libp2p, Identify), (delimited(IDENTIFY),), (FrameError, MuxedStreamEOF)
    ),
    "packed_address": Target(
        decode_packed_address,
        tuple(
            Multiaddr(text).to_bytes()
            for text in (ADDRESS, "/ip6/2001:db8::1/tcp/1", "/dns4/example.org/tcp/1", CIRCUIT)
        ),
    ),
    "addresses": Target(
        judge_addresses,
        (ADDRESS.encode(), CIRCUIT.encode(), b"/ip6/fd00::1/tcp/1\n/dns4/example.org/tcp/1"),
        words=(b"/ip4/", b"/ip6/", b"/tcp/", b"/p2p/", b"/p2p-circuit", b"/dns4/", b"\n", b"/"),
    ),
    "muxer": Target(
        run_muxer,
        (
            b"\x0b" + control_frame(1, 1, 1, 0) + b"\x0f" + control_frame(0, 0, 1, 4) + b"data",
            b"\x17" + control_frame(2, 1, 0, 7) + control_frame(3, 0, 0, 0),
        ),
        words=tuple(
            b"\x0b" + control_frame(kind, flags, stream, 0)
            for kind in range(4)
            for flags in (0, 1, 4, 8)
            for stream in (0, 1, 2)
        ),
    ),
    "tensor": Target(decode_tensor, encoded_tensors()),
    "envelope": Target(open_any_envelope, (seal(ORGANISER, "test", b"type", b"payload"),)),
    "certificate": Target(
        lambda data: void(check_certificate(data, RUN, ORGANISER.peer_id, NOW, PEER.peer_id)),
        (CERTIFICATE, RECEIPT),
        (AdmissionError,),
    ),
    "receipt": Target(lambda data: void(Receipt.open(data)), (RECEIPT, CERTIFICATE)),
    "binding": Target(
        lambda data: void(open_carrier_binding(data, PEER.peer_id, NOW)), (BINDING, RECEIPT)
    ),
    "owner_binding": Target(
        lambda data: void(open_owner_binding(data, PEER.peer_id)), (OWNED, BINDING)
    ),
    "probe_pass": Target(
        open_pass,
        (sign_probe_pass(ORGANISER, PEER.peer_id, RUN, NOW).encode(), b"AAAA"),
        (AdmissionError,),
    ),
    "invite": Target(decode_invite, (INVITE.encode().encode(), b"swarm1"), (InviteError,)),
    "averaging_greeting": Target(
        decode_greeting, (frames.StreamHello(1, b"t" * 32, b"d" * 32).encode(),)
    ),
    "averaging_frames": Target(
        decode_averaging,
        (
            frames.Header(frames.FrameKind.PIECE, 1, b"t" * 8, 0, 3, 4).encode() +
            b"\x00\x3c\x00\x3c",
            frames.Header(frames.FrameKind.PIECE, 1, b"t" * 8, 0, 0, 7).encode()
            + b"\x00\x00\x00\x3c\x01\x7f\x80",
            frames.Header(frames.FrameKind.ABORT, 1, b"t" * 8).encode()
            + frames.Abort(next(iter(RoundFailure)), None, "why").encode(),
        ),
    ),
    "router": Target(
        answer_of_router,
        (
            b"\x00\x80\x00\x00\x00\x00\x00\x01\xcb\x00\x71\x07",
            b"\x00\x82\x00\x00\x00\x00\x00\x01\x0f\xa1\x0f\xa1\x00\x00\x0e\x10",
            b"HTTP/1.1 200 OK\r\nLOCATION: http://192.168.1.1:80/igd.xml\r\n\r\n",
            b"Iface\tDestination\tGateway\tFlags\neth0\t00000000\t0101A8C0\t0003\t0\t0\t0\t0\n",
        ),
    ),
}  # fmt: skip


def void(_: object) -> None:
    """For what gives something back that nobody needs."""
