"""Every byte at a socket, and what it was for."""

from __future__ import annotations

from typing import Any

import trio.testing

from benchmarks.wire_bytes.accounting import NOISE_MESSAGE_BYTES, boundaries, kinds
from benchmarks.wire_bytes.gossip import Gossip
from benchmarks.wire_bytes.instrument import Instrument
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step
from swarm_shared.identity.keys import Identity
from swarm_shared.network import FramedStream, FrameLimits, open_node
from swarm_shared.protocol import STAGE_PROTOCOL, Backward, Forward, encode

LIMITS = FrameLimits(max_payload_bytes=2**21)
ANY_PORT = "/ip4/127.0.0.1/tcp/0"
INPUT, TARGETS = bytes(300_000), bytes(4_000)
FORWARD = Forward(
    request=1, step=Step(1), microbatch=MicrobatchIndex(0), stage=StageIndex(1), accumulate=(),
    input_bytes=len(INPUT), target_bytes=len(TARGETS), ticket="",
)  # fmt: skip
BACKWARD = Backward(request=1, receipts=(), service_seconds=0.0, loss_sum=1.0, tokens=1)


async def answer(stream: FramedStream) -> None:
    frame = await stream.receive()
    await stream.send(encode(BACKWARD), frame.payload[: len(INPUT)])
    await stream.receive()


async def test_kinds_add_up_to_what_the_sockets_have_sent() -> None:
    instrument = Instrument()
    with instrument.counting():
        async with (
            open_node(Identity.generate(), [ANY_PORT]) as here,
            open_node(Identity.generate(), [ANY_PORT]) as there,
        ):
            there.serve(STAGE_PROTOCOL, answer, LIMITS)
            stream = await here.open_stream(there.peer_id, STAGE_PROTOCOL, LIMITS, there.addresses)
            await stream.send(encode(FORWARD), (INPUT, TARGETS))
            await stream.receive()
            await stream.close()
            await trio.testing.wait_all_tasks_blocked()
            # What the bandwidth's limit counts, for reasons of its own.
            sockets = here.bandwidth.up.bytes + there.bandwidth.up.bytes
            document = instrument.document()
    found = kinds([document])
    assert sum(found.values()) == sockets
    assert found["activations and gradients"] == 2 * len(INPUT)
    assert found["token ids and targets"] == len(TARGETS)
    assert found["stage frames' headers, with receipts"] == (
        24 + len(encode(FORWARD)) + len(encode(BACKWARD))
    )
    messages = sum(one["noise_messages"] for one in document["connections"])
    assert found["Noise"] == NOISE_MESSAGE_BYTES * messages
    assert found["muxer, and the opening of streams"] > 0
    assert found["handshakes"] > 0


async def test_nothing_is_counted_any_more_once_counting_has_ended() -> None:
    before = FramedStream.send
    with Instrument().counting():
        assert FramedStream.send is not before
    assert FramedStream.send is before


def frames(remote: str, kind: str, count: int, header: int, payload: int, targets: int) -> Any:
    return {
        "remote": remote, "protocol": "stage", "kind": kind, "frames": count,
        "header_bytes": header, "payload_bytes": payload, "targets_bytes": targets,
    }  # fmt: skip


def line(remote: str, size: int) -> Any:
    return {"remote": remote, "socket_bytes": size, "muxer_bytes": size, "noise_messages": 0}


def test_a_boundary_has_both_directions_and_no_bytes_of_other_streams() -> None:
    first = {
        "peer": "a",
        "frames": [
            frames("b", "activation", 3, 30, 330, 30),
            {**frames("b", "", 9, 5, 0, 0), "protocol": "transfer"},
        ],
        "connections": [line("b", 400)],
    }
    second = {
        "peer": "b",
        "frames": [
            frames("a", "gradient", 2, 20, 200, 0),
            frames("a", "tokens", 1, 10, 50, 25),
            frames("c", "activation", 2, 20, 220, 20),
        ],
        "connections": [line("a", 300), line("c", 250), line("organiser", 10**6)],
    }
    gradients = [frames("b", "gradient", 2, 9, 200, 0)]
    last = {"peer": "c", "frames": gradients, "connections": [line("b", 210)]}
    near, far = boundaries([first, second, last], {"a": 0, "b": 1, "c": 2}, 100, 2)
    assert (near.microbatches, near.least) == (3, 400)
    assert (near.tensors, near.targets, near.headers) == (500, 30, 50)
    assert near.below == 700 - (30 + 330 + 5 + 20 + 200 + 10 + 50)
    assert near.sent == 500 + 30 + 50 + 55
    assert (far.tensors, far.targets, far.headers, far.below) == (400, 20, 29, 11)


SOCKETS = """\
ESTAB 0 0 127.0.0.1:1 127.0.0.1:2 users:(("p2pd",pid=7,fd=22))
\t bbr bytes_sent:1000 bytes_acked:900
ESTAB 0 0 127.0.0.1:2 127.0.0.1:1 users:(("python",pid=7,fd=16))
\t bbr bytes_sent:5000
ESTAB 0 0 127.0.0.1:3 127.0.0.1:1 users:(("p2pd",pid=8,fd=16))
\t bbr bytes_sent:70
"""


def test_gossip_is_the_last_count_of_each_socket_of_our_p2pd() -> None:
    gossip = Gossip()
    gossip.measurable = True
    gossip.take(SOCKETS, {7})
    gossip.take(SOCKETS.replace("1000", "1200"), {7})
    gossip.take("", {7})
    assert gossip.total_bytes == 1200
