"""Two nodes in one process: connecting, serving, framing, closing."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from kits.network.nodes import ANY_PORT, ECHO, echo
from shared.network.test_dialer import refusing_address, silent_address
from swarm_shared.base.errors import LinkClosed, LinkTimeout, NetworkError, ProtocolError
from swarm_shared.base.types import PeerId
from swarm_shared.identity.keys import Identity
from swarm_shared.network import FramedStream, FrameLimits, Node, open_node
from swarm_shared.network.libp2p import yamux
from swarm_shared.protocol import LinkBytes

LIMITS = FrameLimits(max_payload_bytes=32 * 1024 * 1024)
SILENT = "/test/silent/1"


async def silent(stream: FramedStream) -> None:
    """Receives nothing: what the remote sends stays in the muxer's window."""
    await trio.sleep_forever()


@asynccontextmanager
async def two_nodes(**options: int) -> AsyncIterator[tuple[Node, Node]]:
    """The second is connected to the first, which serves ECHO and SILENT."""
    async with (
        open_node(Identity.generate(), [ANY_PORT], **options) as server,
        open_node(Identity.generate(), [ANY_PORT]) as client,
    ):
        server.serve(ECHO, echo, LIMITS)
        server.serve(SILENT, silent, LIMITS)
        await client.connect(server.peer_id, server.addresses)
        yield server, client


async def test_frames_arrive_as_they_were_sent_and_both_ends_know_each_other() -> None:
    async with two_nodes() as (server, client):
        remotes = []

        async def handler(stream: FramedStream) -> None:
            remotes.append(stream.remote)
            await echo(stream)

        server.serve("/test/known/1", handler, LIMITS)
        stream = await client.open_stream(server.peer_id, "/test/known/1", LIMITS)
        assert stream.remote == server.peer_id
        parts = [bytes(range(256)) * 300, b"", memoryview(bytearray(b"tail"))]
        for header, payload in ((b"", b""), (b'{"a":1}', b"small"), (b"h" * 60_000, parts)):
            await stream.send(header, payload)
            frame = await stream.receive(timeout_seconds=10)
            assert frame.header == header
            assert frame.payload == (payload if isinstance(payload, bytes) else b"".join(parts))
        assert remotes == [client.peer_id]


async def test_many_big_frames_go_both_ways_at_once() -> None:
    sizes = [1, 16, 1, 4, 1, 1, 4, 1]
    payloads = [bytes([index]) * (size << 20) for index, size in enumerate(sizes)]

    async def exchange(stream: FramedStream) -> None:
        async with trio.open_nursery() as nursery:

            async def send_all() -> None:
                for index, payload in enumerate(payloads):
                    await stream.send(str(index).encode(), payload)

            nursery.start_soon(send_all)
            for index, payload in enumerate(payloads):
                frame = await stream.receive()
                assert frame.header == str(index).encode()
                assert frame.payload == payload

    async with two_nodes() as (server, client):
        done = trio.Event()

        async def handler(stream: FramedStream) -> None:
            await exchange(stream)
            done.set()

        server.serve("/test/exchange/1", handler, LIMITS)
        stream = await client.open_stream(server.peer_id, "/test/exchange/1", LIMITS)
        await exchange(stream)
        await done.wait()


async def test_two_dozen_streams_that_are_full_both_ways_all_finish() -> None:
    """py-libp2p's own muxer stops dead here."""
    payload = bytes(2 << 20)

    async def exchange(stream: FramedStream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send, b"", payload)
            assert (await stream.receive()).payload == payload

    async with two_nodes() as (server, client), trio.open_nursery() as nursery:
        server.serve("/test/exchange/1", exchange, LIMITS)

        async def call() -> None:
            await exchange(await client.open_stream(server.peer_id, "/test/exchange/1", LIMITS))

        for _ in range(24):
            nursery.start_soon(call)


async def test_streams_that_nobody_reads_do_not_hold_up_the_others() -> None:
    """Both ends write more than windows and socket buffers take, on many streams, and nobody
    reads: pings, new streams and other streams' data must still get through."""
    big = bytes(4 << 20)

    async def flood(stream: FramedStream) -> None:
        await stream.send(b"flood", big)

    async with two_nodes() as (server, client), trio.open_nursery() as nursery:
        server.serve("/test/flood/1", flood, LIMITS)
        for _ in range(20):
            stream = await client.open_stream(server.peer_id, "/test/flood/1", LIMITS)
            nursery.start_soon(flood, stream)
        for _ in range(5):
            stream = await client.open_stream(server.peer_id, ECHO, LIMITS)
            await stream.send(b"hello", bytes(1 << 20))
            assert (await stream.receive(timeout_seconds=20)).header == b"hello"
            await stream.close()
        nursery.cancel_scope.cancel()


async def test_several_senders_on_one_stream_do_not_mix_their_frames() -> None:
    async with two_nodes() as (server, client), trio.open_nursery() as nursery:
        stream = await client.open_stream(server.peer_id, ECHO, LIMITS)
        for index in range(8):
            nursery.start_soon(stream.send, bytes([index]), bytes([index]) * 300_000)
        for _ in range(8):
            frame = await stream.receive()
            assert frame.payload == frame.header * 300_000


async def test_a_receive_that_times_out_loses_nothing() -> None:
    async with two_nodes() as (server, client):
        proceed = trio.Event()

        async def in_two_pieces(stream: FramedStream) -> None:
            whole = bytes.fromhex("00000003 0000000000000005".replace(" ", "")) + b"abcdefgh"
            await stream._stream.write(whole[:14])
            await proceed.wait()
            await stream._stream.write(whole[14:])

        server.serve("/test/pieces/1", in_two_pieces, LIMITS)
        stream = await client.open_stream(server.peer_id, "/test/pieces/1", LIMITS)
        for _ in range(2):
            with pytest.raises(LinkTimeout, match=server.peer_id):
                await stream.receive(timeout_seconds=0.05)
        with trio.move_on_after(0.05) as scope:
            await stream.receive()
        assert scope.cancelled_caught
        proceed.set()
        frame = await stream.receive(timeout_seconds=10)
        assert (frame.header, frame.payload) == (b"abc", b"defgh")


async def test_a_send_that_is_cut_ends_its_stream_and_no_other() -> None:
    async with two_nodes() as (server, client):
        ended: list[str] = []
        heard = trio.Event()

        async def listen(stream: FramedStream) -> None:
            await wait_until_full.wait()
            try:
                await stream.receive()
            except LinkClosed as error:
                ended.append(str(error))
                heard.set()

        wait_until_full = trio.Event()
        server.serve("/test/cut/1", listen, LIMITS)
        other = await client.open_stream(server.peer_id, ECHO, LIMITS)
        stream = await client.open_stream(server.peer_id, "/test/cut/1", LIMITS)
        with pytest.raises(LinkTimeout):
            await stream.send(b"", bytes(8 << 20), timeout_seconds=0.1)
        with pytest.raises(LinkClosed):
            await stream.send(b"again")
        wait_until_full.set()
        await heard.wait()
        assert len(ended) == 1
        await other.send(b"still here", bytes(1 << 20))
        assert (await other.receive()).header == b"still here"


async def test_a_send_that_was_cancelled_before_its_first_byte_leaves_the_stream_usable() -> None:
    async with two_nodes() as (server, client):
        stream = await client.open_stream(server.peer_id, ECHO, LIMITS)
        with trio.CancelScope() as scope:
            scope.cancel()
            await stream.send(b"never")
        await stream.send(b"hello")
        assert (await stream.receive()).header == b"hello"


async def test_an_error_in_a_handler_resets_its_stream_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(stream: FramedStream) -> None:
        await stream.receive()
        raise ZeroDivisionError("the handler's own fault")

    async with two_nodes() as (server, client):
        server.serve("/test/fail/1", fail, LIMITS)
        survivor = await client.open_stream(server.peer_id, ECHO, LIMITS)
        with caplog.at_level(logging.DEBUG, logger="swarm_shared"):
            stream = await client.open_stream(server.peer_id, "/test/fail/1", LIMITS)
            await stream.send(b"go")
            with pytest.raises(LinkClosed):
                await stream.receive(timeout_seconds=10)
        assert server.handler_errors == {"/test/fail/1": 1}
        tracebacks = [record for record in caplog.records if record.exc_info]
        assert len(tracebacks) == 1
        await survivor.send(b"hello")
        assert (await survivor.receive()).header == b"hello"


async def test_a_remotes_fault_in_a_handler_is_not_counted_as_ours() -> None:
    async def refuse(stream: FramedStream) -> None:
        raise ProtocolError("the remote said something impossible")

    async with two_nodes() as (server, client):
        server.serve("/test/refuse/1", refuse, LIMITS)
        stream = await client.open_stream(server.peer_id, "/test/refuse/1", LIMITS)
        with pytest.raises(LinkClosed):
            await stream.receive(timeout_seconds=10)
        assert server.handler_errors == {}


async def test_what_a_handler_sent_before_it_returned_arrives() -> None:
    async def answer(stream: FramedStream) -> None:
        for index in range(3):
            await stream.send(bytes([index]), bytes(1 << 20))

    async with two_nodes() as (server, client):
        server.serve("/test/answer/1", answer, LIMITS)
        stream = await client.open_stream(server.peer_id, "/test/answer/1", LIMITS)
        for index in range(3):
            assert (await stream.receive()).header == bytes([index])
        with pytest.raises(LinkClosed, match="ended the stream"):
            await stream.receive()


async def test_finished_streams_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """More streams one after the other than may be open at once."""
    monkeypatch.setattr(yamux, "MAX_REMOTE_STREAMS", 5)

    async def answer(stream: FramedStream) -> None:
        await stream.send((await stream.receive()).header)

    async with two_nodes() as (server, client):
        server.serve("/test/answer/1", answer, LIMITS)
        for index in range(30):
            stream = await client.open_stream(server.peer_id, "/test/answer/1", LIMITS)
            await stream.send(b"hello")
            assert (await stream.receive()).header == b"hello"
            # Closing and vanishing must both do.
            await (stream.close() if index % 2 else stream.reset())
        for node in (server, client):
            [connection] = node._swarm.get_connections()
            with trio.fail_after(5):
                while connection.muxed_conn._streams or connection.streams:
                    await trio.lowlevel.checkpoint()
            assert connection.muxed_conn._window_budget == yamux.EXTRA_WINDOW_BUDGET_BYTES
        assert not server._inbound._open


async def test_a_protocol_that_is_not_served_is_a_network_error() -> None:
    async with two_nodes() as (server, client):
        with pytest.raises(NetworkError, match=f"{server.peer_id} does not serve /test/none/1"):
            await client.open_stream(server.peer_id, "/test/none/1", LIMITS)


async def test_a_peer_may_open_so_many_streams_and_no_more() -> None:
    async with two_nodes(max_inbound_streams_per_peer=3) as (server, client):
        streams = [await client.open_stream(server.peer_id, SILENT, LIMITS) for _ in range(3)]
        with pytest.raises(NetworkError):
            await client.open_stream(server.peer_id, SILENT, LIMITS)
        async with open_node(Identity.generate()) as another:
            await another.open_stream(server.peer_id, SILENT, LIMITS, server.addresses)
        assert len(streams) == 3


async def test_opening_a_stream_connects_first_when_addresses_are_given() -> None:
    async with two_nodes() as (server, _), open_node(Identity.generate()) as late:
        with pytest.raises(NetworkError, match="not connected"):
            await late.open_stream(server.peer_id, ECHO, LIMITS)
        stream = await late.open_stream(server.peer_id, ECHO, LIMITS, server.addresses)
        await stream.send(b"hello")
        assert (await stream.receive()).header == b"hello"
        assert late.connected_peers == (server.peer_id,)


async def test_one_good_address_among_bad_ones_is_enough() -> None:
    with silent_address() as silent:
        bad = [silent, refusing_address(), "nonsense", "/ip4/127.0.0.1/udp/4001/quic-v1"]
        async with two_nodes() as (server, _), open_node(Identity.generate()) as late:
            await late.connect(server.peer_id, [*bad, *server.addresses])
            assert late.is_connected(server.peer_id)


async def test_a_peer_that_cannot_be_reached_is_a_network_error_each_time() -> None:
    """py-libp2p itself would remember a failure and not try again for a minute."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        identity = Identity.generate()
        address = f"/ip4/127.0.0.1/tcp/{port}"
        async with open_node(Identity.generate()) as client:
            for _ in range(2):
                with pytest.raises(NetworkError, match=f"cannot be reached.*tcp/{port}"):
                    await client.connect(identity.peer_id, [address])
            holder.close()
            async with open_node(identity, [address]):
                await client.connect(identity.peer_id, [address])


async def test_why_a_peer_cannot_be_reached_is_said_once_for_all_of_its_addresses() -> None:
    peer = Identity.generate().peer_id
    async with open_node(Identity.generate()) as client:
        with pytest.raises(NetworkError) as failure:
            await client.connect(peer, [refusing_address(), refusing_address()])
    assert str(failure.value) == f"{peer} cannot be reached: connection refused at 2 addresses"


async def test_an_address_that_never_answers_is_a_time_out() -> None:
    with silent_address() as silent:
        async with open_node(Identity.generate()) as client:
            with pytest.raises(LinkTimeout, match=r"did not answer within 0\.3 s"):
                await client.connect(Identity.generate().peer_id, [silent], timeout_seconds=0.3)


async def test_a_node_does_not_connect_to_itself() -> None:
    async with open_node(Identity.generate(), [ANY_PORT]) as node:
        with pytest.raises(NetworkError, match="itself"):
            await node.connect(node.peer_id, node.addresses)


async def test_both_ends_may_connect_at_the_same_moment() -> None:
    for _ in range(3):
        async with (
            open_node(Identity.generate(), [ANY_PORT]) as left,
            open_node(Identity.generate(), [ANY_PORT]) as right,
        ):
            answers = []

            async def call(here: Node, there: Node, answers: list[bytes] = answers) -> None:
                stream = await here.open_stream(there.peer_id, ECHO, LIMITS, there.addresses)
                for index in range(10):
                    await stream.send(bytes([index]), bytes(200_000))
                    answers.append((await stream.receive(timeout_seconds=10)).header)

            for node in (left, right):
                node.serve(ECHO, echo, LIMITS)
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(call, left, right)
                    nursery.start_soon(call, right, left)
            assert len(answers) == 60


async def test_the_loss_of_the_last_connection_is_told() -> None:
    async with two_nodes() as (server, client):
        lost: list[tuple[str, PeerId]] = []
        told = trio.Event()

        def broken(peer: PeerId) -> None:
            raise ZeroDivisionError

        def tell(peer: PeerId) -> None:
            lost.append(("server", peer))
            told.set()

        server.on_disconnect.append(broken)
        server.on_disconnect.append(tell)
        client.on_disconnect.append(lambda peer: lost.append(("client", peer)))
        stream = await client.open_stream(server.peer_id, ECHO, LIMITS)
        await client.disconnect(server.peer_id)
        await told.wait()
        assert sorted(lost) == [("client", server.peer_id), ("server", client.peer_id)]
        assert not client.is_connected(server.peer_id)
        with pytest.raises(LinkClosed):
            await stream.receive(timeout_seconds=5)
        await client.connect(server.peer_id, server.addresses)
        assert client.is_connected(server.peer_id)


async def test_bytes_are_counted_by_peer_protocol_and_direction() -> None:
    async with two_nodes() as (server, client):
        stream = await client.open_stream(server.peer_id, ECHO, LIMITS)
        for _ in range(2):
            await stream.send(b"head", bytes(100_000))
            await stream.receive()
        size_bytes = 2 * (12 + 4 + 100_000)
        for node, remote in ((client, server.peer_id), (server, client.peer_id)):
            assert node.link_bytes() == (
                LinkBytes(remote=remote, protocol=ECHO, sent=size_bytes, received=size_bytes),
            )


@pytest.mark.parametrize("holder_is_a_node", [True, False])
async def test_a_port_in_use_is_named(holder_is_a_node: bool) -> None:
    async with open_node(Identity.generate(), [ANY_PORT]) as holder:
        with socket.socket() as plain:
            plain.bind(("127.0.0.1", 0))
            plain.listen()
            port = int(
                holder.addresses[0].split("/")[4] if holder_is_a_node else plain.getsockname()[1]
            )
            with pytest.raises(NetworkError, match=f"Port {port} .*in use.*another port"):
                async with open_node(Identity.generate(), [f"/ip4/127.0.0.1/tcp/{port}"]):
                    pytest.fail("listened on a port in use")


@pytest.mark.parametrize(
    "address", ["nonsense", "/ip4/127.0.0.1/udp/4001/quic-v1", "/dns4/localhost/tcp/0", ""]
)
async def test_what_cannot_be_listened_on_is_a_network_error(address: str) -> None:
    with pytest.raises(NetworkError, match="/ip4/"):
        async with open_node(Identity.generate(), [address]):
            pytest.fail("listened")


async def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(NetworkError, match=r"no address 203\.0\.113\.9"):
        async with open_node(Identity.generate(), ["/ip4/203.0.113.9/tcp/4001"]):
            pytest.fail("listened")


async def test_a_wildcard_address_stands_for_this_machines_own() -> None:
    async with (
        open_node(Identity.generate(), ["/ip4/0.0.0.0/tcp/0"]) as server,
        open_node(Identity.generate()) as client,
    ):
        assert all(address.endswith(f"/p2p/{server.peer_id}") for address in server.addresses)
        assert not any("/0.0.0.0/" in address for address in server.addresses)
        assert "/ip4/127.0.0.1/" in server.addresses[-1]
        await client.connect(server.peer_id, server.addresses[-1:])


async def test_a_closed_node_has_ended_everything() -> None:
    async with open_node(Identity.generate(), [ANY_PORT]) as server:
        server.serve(SILENT, silent, LIMITS)
        port = int(server.addresses[0].split("/")[4])
        async with open_node(Identity.generate()) as client:
            stream = await client.open_stream(server.peer_id, SILENT, LIMITS, server.addresses)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    with pytest.raises(LinkClosed):
        await stream.receive(timeout_seconds=1)
    with pytest.raises(LinkClosed):
        await stream.send(b"x")


async def test_a_node_closes_promptly_with_a_remote_that_reads_nothing() -> None:
    async with open_node(Identity.generate(), [ANY_PORT]) as server:
        server.serve(SILENT, silent, LIMITS)
        started = trio.current_time()
        async with open_node(Identity.generate()) as client, trio.open_nursery() as nursery:
            stream = await client.open_stream(server.peer_id, SILENT, LIMITS, server.addresses)
            nursery.start_soon(stream.send, b"", bytes(20 << 20))
            await trio.testing.wait_all_tasks_blocked(0.05)
            nursery.cancel_scope.cancel()
        assert trio.current_time() - started < 5


async def test_a_cancelled_node_closes_and_cancellation_passes_through() -> None:
    with trio.move_on_after(0.2) as scope:
        async with two_nodes() as (server, client):
            stream = await client.open_stream(server.peer_id, SILENT, LIMITS)
            await stream.receive()
    assert scope.cancelled_caught


async def test_a_failure_of_the_host_ends_the_block_with_a_network_error() -> None:
    async def fail() -> None:
        raise ZeroDivisionError("a fault inside py-libp2p")

    async def run() -> None:
        async with open_node(Identity.generate(), [ANY_PORT]) as node:
            node._manager.run_task(fail)
            await trio.sleep_forever()

    with pytest.raises(NetworkError, match="a fault inside py-libp2p"):
        await run()


async def test_what_the_block_raises_comes_out_as_it_was() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with open_node(Identity.generate()):
            raise KeyError("mine")


async def test_nothing_is_remembered_of_strangers_that_have_gone() -> None:
    """py-libp2p's connector notes each one, to dial it less often, and here never forgets it."""
    async with open_node(Identity.generate(), [ANY_PORT]) as server:
        for _ in range(3):
            async with open_node(Identity.generate()) as client:
                await client.connect(server.peer_id, server.addresses)
        with trio.fail_after(10):
            while server.connected_peers:
                await trio.sleep(0.01)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert not server._swarm.auto_connector._recent_disconnects
