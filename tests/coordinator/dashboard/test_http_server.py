"""HTTP/1.1 on a public port: a slow, greedy or invalid client harms only itself."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import anyio
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kits.certificate import write_certificate
from kits.coordinator.http_server import Served, serving
from kits.waiting import until
from swarm_coordinator.configuration.http_address import (
    HttpAddress,
    address_of,
    listen,
    tls_context,
)
from swarm_coordinator.dashboard.http_server import (
    MAX_BODY_BYTES,
    MAX_CONNECTIONS_OF_ONE_ADDRESS,
    MAX_HEAD_BYTES,
    HttpServer,
    is_this_machine,
    plain_address,
)

REQUEST = b"GET /one HTTP/1.1\r\nhost: here\r\n\r\n"
LAST = b"GET /one HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n"
LARGE, SOME = 32 * 2**20, 48 * 2**10


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the path and the body; /never goes on for ever, /broken fails.

    /large is more than the sockets' buffers hold, /some is less. /client names the client instead
    of the body.
    """
    body = (await receive())["body"]
    if scope["path"] == "/broken":
        raise RuntimeError("on purpose")
    body = str(scope["client"][0]).encode() if scope["path"] == "/client" else body
    if scope["path"] == "/never":
        await StreamingResponse(without_end())(scope, receive, send)
        return
    content = f"{scope['method']} {scope['path']} {body.decode()}".encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    content = {"/large": b"x" * LARGE, "/some": b"x" * SOME}.get(scope["path"], content)
    await send({"type": "http.response.body", "body": content})


async def without_end() -> AsyncIterator[bytes]:
    while True:
        yield b"x" * 65_536


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[tuple[HttpServer, int, Served]]:
    server = HttpServer(echo, **{"reserved_connections": 0, **options})
    with serving(server.serve) as served:
        yield server, served.address.port, served


async def say(port: int, *parts: bytes, end: bool = False) -> bytes:
    """Everything that comes back until the server closes."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        try:
            for part in parts:
                await stream.send_all(part)
            if end:
                await stream.send_eof()
        except trio.BrokenResourceError:
            pass  # it has heard enough
        return await read_all(stream)


async def send_until_closed(stream: trio.SocketStream) -> None:
    """Send single bytes, as slowly as a client that wants to hold a connection."""
    with suppress(trio.BrokenResourceError):
        while True:
            await stream.send_all(b"a")
            await trio.sleep(0.02)


async def read_all(stream: trio.abc.ReceiveStream) -> bytes:
    content = bytearray()
    try:
        async for part in stream:
            content += part
    except trio.BrokenResourceError:
        pass  # it was closed with our words unread
    return bytes(content)


async def test_requests_follow_each_other_on_one_connection() -> None:
    async with running() as (server, port, _):
        answers = await say(port, REQUEST, REQUEST + LAST)
        assert answers.count(b"HTTP/1.1 200 OK") == 3
        assert answers.count(b"GET /one ") == 3
        await until(lambda: server.connections == 0)


async def test_a_body_reaches_the_application_whole_however_it_is_cut() -> None:
    head = b"POST /b HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\nconnection: close\r\n\r\n"
    async with running() as (_, port, _):
        assert b"POST /b abcdef" in await say(port, head[:20], head[20:], b"abc", b"def")


async def test_no_body_is_sent_in_answer_to_head() -> None:
    async with running() as (_, port, _):
        answer = await say(port, LAST.replace(b"GET", b"HEAD"))
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nbig: " + b"a" * 2 * MAX_HEAD_BYTES, 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\nbig: " + b"a" * 4 * MAX_HEAD_BYTES + b"\r\n\r\n", 431),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n"
            + b"a" * (MAX_BODY_BYTES + 1),
            413,
        ),
    ],
    ids=["no-http", "no-host", "tls", "large-head", "large-whole-head", "large-body"],
)
async def test_what_is_no_request_is_refused_and_the_connection_closed(
    words: bytes, status: int
) -> None:
    async with running(body_seconds=1e6) as (server, port, _):
        answer = await say(port, words)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        await until(lambda: server.connections == 0)
        assert server.bad_requests == 1


async def test_a_failure_of_the_application_ends_its_own_request_only() -> None:
    async with running() as (server, port, _):
        answer = await say(port, REQUEST.replace(b"/one", b"/broken"))
        assert answer.startswith(b"HTTP/1.1 500 ")
        assert b"on purpose" not in answer
        assert b"200 OK" in await say(port, LAST)
        assert server.failures == 1


async def test_a_client_that_does_not_finish_a_head_in_time_is_disconnected() -> None:
    async with running(head_seconds=0.05) as (server, port, _):
        assert await say(port, b"GET / HTTP/1.1\r\nslow: ") == b""
        await until(lambda: server.connections == 0)


async def test_bytes_that_keep_arriving_do_not_prolong_the_time_for_a_head() -> None:
    async with (
        running(head_seconds=0.3) as (server, port, _),
        await trio.open_tcp_stream("127.0.0.1", port) as stream,
    ):
        await stream.send_all(b"GET / HTTP/1.1\r\nslow: ")
        await send_until_closed(stream)
        await until(lambda: server.connections == 0)


async def test_a_connection_without_a_next_request_is_closed() -> None:
    async with running(head_seconds=0.1) as (server, port, _):
        assert (await say(port, REQUEST)).startswith(b"HTTP/1.1 200 OK")
        assert await say(port) == b""
        await until(lambda: server.connections == 0)
        assert server.bad_requests == 0


async def test_a_body_that_takes_too_long_is_refused_even_if_bytes_keep_arriving() -> None:
    head = b"POST /b HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n"
    async with (
        running(body_seconds=0.3) as (server, port, _),
        await trio.open_tcp_stream("127.0.0.1", port) as stream,
    ):
        await stream.send_all(head)
        await send_until_closed(stream)
        assert (await read_all(stream)).startswith(b"HTTP/1.1 408 ")
        await until(lambda: server.connections == 0)
        assert server.bad_requests == 1


async def test_a_connection_carries_only_so_many_requests() -> None:
    async with running(max_requests=2) as (_, port, _):
        assert (await say(port, REQUEST * 3)).count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c"])
async def test_there_is_no_other_protocol_and_the_program_is_not_named(upgrade: bytes) -> None:
    asked = (
        b"\r\nupgrade: "
        + upgrade
        + b"\r\nsec-websocket-key: x\r\nconnection: upgrade, close\r\n\r\n"
    )
    async with running() as (_, port, _):
        answer = await say(port, REQUEST.replace(b"\r\n\r\n", asked))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
    assert b"\r\nserver:" not in answer.lower()


async def test_a_client_that_never_reads_does_not_hold_a_connection_forever() -> None:
    async with (
        running(send_seconds=0.05) as (server, port, _),
        await trio.open_tcp_stream("127.0.0.1", port) as stream,
    ):
        await stream.send_all(REQUEST.replace(b"/one", b"/never"))
        await until(lambda: server.connections == 1)
        await until(lambda: server.connections == 0)


@pytest.mark.parametrize("asked", [LAST, REQUEST], ids=["closed", "kept"])
async def test_a_client_that_never_reads_the_end_of_its_response_is_disconnected(
    asked: bytes,
) -> None:
    """The application is done by then, and what is left fits into the transport's buffer."""
    async with running(send_seconds=0.1, head_seconds=0.2) as (server, _, served):
        [stream] = await connections_from(served, server, ["198.51.100.1"], buffer_bytes=4096)
        await stream.send_all(asked.replace(b"/one", b"/some"))
        await until(lambda: server.state.total_requests == 1)
        await until(lambda: server.connections == 0)


async def test_a_slow_client_gets_the_end_of_its_response_after_the_time_for_a_head() -> None:
    async with (
        running(head_seconds=0.05) as (server, port, _),
        await trio.open_tcp_stream("127.0.0.1", port) as stream,
    ):
        await stream.send_all(REQUEST.replace(b"/one", b"/large"))
        await until(lambda: server.connections == 1)
        await until(lambda: not server.state.tasks)
        await until(lambda: all(it.transport.is_closing() for it in server.state.connections))
        assert (await read_all(stream)).count(b"x") >= LARGE


async def test_an_answer_without_end_ends_when_its_reader_goes() -> None:
    async with running() as (server, port, _):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(REQUEST.replace(b"/one", b"/never"))
            await stream.receive_some(1000)
        await until(lambda: server.connections == 0)
        assert server.failures == 0


def test_the_end_of_the_server_ends_every_request() -> None:
    async def main() -> None:
        with closing(listen(HttpAddress("127.0.0.1", 0))) as bound:
            bound.setblocking(False)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.serve, bound)
                for _ in range(3):
                    stream = await anyio.connect_tcp("127.0.0.1", address_of(bound).port)
                    await stream.send(REQUEST.replace(b"/one", b"/never"))
                    await stream.receive()
                    streams.append(stream)
                tasks.cancel_scope.cancel()
            assert server.state.tasks == set()
            for stream in streams:
                await stream.aclose()

    server = HttpServer(echo)
    streams: list[anyio.abc.SocketStream] = []
    anyio.run(main)
    assert server.failures == 0


async def test_more_connections_than_allowed_are_refused() -> None:
    async with running(max_connections=1) as (server, port, _):
        async with await trio.open_tcp_stream("127.0.0.1", port) as first:
            await first.send_all(REQUEST)
            await first.receive_some(1000)
            refused = await say(port)
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 5\r\n" in refused
            assert await say(port, REQUEST) == refused, "also if a request was sent"
        assert server.refused_connections == 2
        await until(lambda: server.connections == 0)
        assert b"200 OK" in await say(port, LAST)


async def connections_from(
    served: Served, server: HttpServer, addresses: Iterable[str], buffer_bytes: int = 2**16
) -> list[trio.SocketStream]:
    """Connections from addresses that this machine does not have."""
    ours: list[trio.SocketStream] = []
    for address in addresses:
        theirs, our = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        served.portal.start_task_soon(server.handle, theirs, address)
        ours.append(trio.SocketStream(trio.socket.from_stdlib_socket(our)))
    return ours


async def test_one_address_has_only_so_many_connections_but_this_machine_as_many_as_it_likes() -> (
    None
):
    limits = {"max_connections": 10, "max_connections_of_one_address": 2}
    async with running(**limits, reserved_connections=1) as (server, _, served):
        own = ["127.0.0.1"] * 3 + ["::1"] * 3
        kept = await connections_from(served, server, ["198.51.100.1"] * 2 + own)
        await until(lambda: server.connections == 8)
        kept += await connections_from(served, server, ["198.51.100.1"])
        assert (await read_all(kept[-1])).startswith(b"HTTP/1.1 503 ")
        kept += await connections_from(served, server, ["198.51.100.2", "198.51.100.3"])
        await until(lambda: server.connections == 10)
        kept += await connections_from(served, server, ["198.51.100.4"])
        assert (await read_all(kept[-1])).startswith(b"HTTP/1.1 503 ")
        kept += await connections_from(served, server, ["127.0.0.1"])
        await until(lambda: server.connections == 11)  # the others do not keep out this machine
        kept += await connections_from(served, server, ["127.0.0.1"])
        assert (await read_all(kept[-1])).startswith(b"HTTP/1.1 503 ")
        assert server.refused_connections == 3


async def test_all_addresses_of_a_v6_network_together_have_the_connections_of_one_address() -> None:
    """A household has a /64, and a rented machine as well: 2^64 addresses."""
    async with running(max_connections=512) as (server, _, served):
        kept = await connections_from(
            served, server, (f"2001:db8::{number:x}" for number in range(512))
        )
        refused = 512 - MAX_CONNECTIONS_OF_ONE_ADDRESS
        await until(lambda: server.refused_connections == refused)
        assert server.connections == MAX_CONNECTIONS_OF_ONE_ADDRESS
        kept += await connections_from(served, server, ["2001:db8:0:1::1"])
        await until(lambda: server.connections == MAX_CONNECTIONS_OF_ONE_ADDRESS + 1)
        assert server.refused_connections == refused, "another household"


# ---------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """What the server and its clients need."""
    folder = tmp_path_factory.mktemp("tls")
    pem, key = write_certificate(folder, "localhost")
    server = tls_context(folder, pem.name, key.name)
    assert server is not None
    return server, ssl.create_default_context(cafile=str(pem))


async def connect_over_tls(port: int, context: ssl.SSLContext) -> trio.SSLStream:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    return trio.SSLStream(stream, context, server_hostname="localhost", https_compatible=True)


async def test_over_tls_requests_are_answered_and_what_is_no_tls_is_counted(
    tls: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    async with running(tls=tls[0], send_seconds=0.2) as (server, port, _):
        assert await say(port, LAST) == b""
        await until(lambda: server.bad_requests == 1)
        async with await connect_over_tls(port, tls[1]) as stream:
            await stream.do_handshake()
            await trio.sleep(0.5)  # while nothing is sent, SEND_SECONDS do not pass
            await stream.send_all(REQUEST + LAST)
            assert (await read_all(stream)).count(b"HTTP/1.1 200 OK") == 2
        await until(lambda: server.connections == 0)


async def test_a_handshake_takes_a_place_and_is_disconnected_in_time(
    tls: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    async with running(tls=tls[0], max_connections=1, head_seconds=0.5) as (server, port, _):
        async with await trio.open_tcp_stream("127.0.0.1", port) as silent:
            await until(lambda: server.connections == 1)
            assert await say(port) == b""
            assert server.refused_connections == 1
            assert await read_all(silent) == b""
        await until(lambda: server.connections == 0)
        await until(lambda: server.bad_requests == 1)


@pytest.mark.parametrize("request_", [b"/never", b"/large", b"/one"])
async def test_over_tls_a_client_that_never_reads_is_disconnected(
    tls: tuple[ssl.SSLContext, ssl.SSLContext], request_: bytes
) -> None:
    async with running(tls=tls[0], send_seconds=0.1, head_seconds=0.5) as (server, port, _):
        stream = await connect_over_tls(port, tls[1])
        await stream.send_all(REQUEST.replace(b"/one", request_))
        with trio.fail_after(25):  # asyncio gives a client 30 s to close
            await until(lambda: server.connections == 0)
        await trio.aclose_forcefully(stream)


# ---------------------------------------------------------------- reverse proxies


def through(*addresses: str, path: bytes = b"/client") -> bytes:
    forwarded = "".join(f"x-forwarded-for: {address}\r\n" for address in addresses)
    return LAST.replace(b"/one", path).replace(b"host", forwarded.encode() + b"host")


@pytest.mark.parametrize(
    ("proxies", "forwarded", "client"),
    [
        ((), ["198.51.100.9"], "127.0.0.1"),
        (("198.51.100.0/24",), ["198.51.100.9"], "127.0.0.1"),
        (("127.0.0.1",), ["198.51.100.9"], "198.51.100.9"),
        (("127.0.0.0/8",), [], "127.0.0.1"),
        # A client's own claims stand before what the proxies add.
        (("127.0.0.1",), ["::1, 127.0.0.1, 198.51.100.9"], "198.51.100.9"),
        (("127.0.0.1", "10.0.0.0/8"), ["127.0.0.1", "2001:db8::9, 10.0.0.7"], "2001:db8::9"),
    ],
)
async def test_only_configured_proxies_name_their_clients(
    proxies: tuple[str, ...], forwarded: list[str], client: str
) -> None:
    async with running(proxies=proxies) as (_, port, _):
        answer = await say(port, through(*forwarded))
    assert f"GET /client {client}\r\n".encode() in answer


async def test_behind_a_proxy_each_client_has_the_connections_of_one_address() -> None:
    async with running(proxies=("127.0.0.1",), max_connections_of_one_address=2) as (
        server,
        port,
        _,
    ):
        held = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(2)]
        for stream in held:
            await stream.send_all(through("198.51.100.9", path=b"/never"))
            await stream.receive_some(1000)
        refused = await say(port, through("198.51.100.9"))
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 5\r\n" in refused
        assert server.refused_connections == 1
        for address in ("198.51.100.8", "127.0.0.1"):
            assert (await say(port, through(address))).startswith(b"HTTP/1.1 200 ")
        await held[0].aclose()
        await until(lambda: server.connections == 1)
        assert (await say(port, through("198.51.100.9"))).startswith(b"HTTP/1.1 200 ")
        await held[1].aclose()


def test_this_machine_is_known_at_a_socket_for_both_versions_too() -> None:
    assert is_this_machine(plain_address("::ffff:127.0.0.1"))
    assert plain_address("2001:db8::ffff:1") == "2001:db8::ffff:1"


async def test_a_proxy_itself_has_as_many_connections_as_it_likes() -> None:
    async with running(proxies=("198.51.100.0/24",), max_connections_of_one_address=2) as (
        server, _, served,
    ):  # fmt: skip
        kept = await connections_from(served, server, ["198.51.100.1"] * 5 + ["203.0.113.1"] * 5)
        await until(lambda: server.refused_connections == 3)
        assert server.connections == 7
        del kept


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(st.binary(max_size=200), st.just(REQUEST)), max_size=6))
def test_no_bytes_end_the_server(parts: list[bytes]) -> None:
    async def main() -> None:
        async with running() as (server, port, _):
            await say(port, *parts, end=True)
            assert b"200 OK" in await say(port, LAST)
            assert server.failures == 0

    trio.run(main)
