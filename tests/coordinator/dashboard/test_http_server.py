"""HTTP/1.1 on a public port: a slow, greedy or invalid client harms only itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import h11
import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm_coordinator.dashboard.http_server import (
    MAX_BODY_BYTES,
    MAX_CONNECTIONS_OF_ONE_ADDRESS,
    MAX_HEAD_BYTES,
    HttpServer,
    Message,
)

REQUEST = b"GET /one HTTP/1.1\r\nhost: here\r\n\r\n"
LAST = b"GET /one HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n"


async def echo(scope: Message, receive: Any, send: Callable[[Message], Awaitable[None]]) -> None:
    """Answers with the path and the body; /never goes on for ever, /broken fails."""
    body = (await receive())["body"]
    if scope["path"] == "/broken":
        raise RuntimeError("on purpose")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while scope["path"] == "/never":
        await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
    content = f"{scope['method']} {scope['path']} {body.decode()}".encode()
    await send({"type": "http.response.body", "body": content})


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[tuple[HttpServer, int]]:
    server = HttpServer(echo, **options)
    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(server.serve, listener)
        yield server, listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


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


async def read_all(stream: trio.SocketStream) -> bytes:
    content = bytearray()
    try:
        async for part in stream:
            content += part
    except trio.BrokenResourceError:
        pass  # it was closed with our words unread
    return bytes(content)


async def test_requests_follow_each_other_on_one_connection() -> None:
    async with serving() as (server, port):
        answers = await say(port, REQUEST, REQUEST + LAST)
        assert answers.count(b"HTTP/1.1 200 OK") == 3
        assert answers.count(b"GET /one ") == 3
        await until(lambda: server.connections == 0)


async def test_a_body_reaches_the_application_whole_however_it_is_cut() -> None:
    head = b"POST /b HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\nconnection: close\r\n\r\n"
    async with serving() as (_, port):
        assert b"POST /b abcdef" in await say(port, head[:20], head[20:], b"abc", b"def")


async def test_no_body_is_sent_in_answer_to_head() -> None:
    async with serving() as (_, port):
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
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n"
            + b"a" * (MAX_BODY_BYTES + 1),
            413,
        ),
    ],
    ids=["no-http", "no-host", "tls", "large-head", "large-body"],
)
async def test_what_is_no_request_is_refused_and_the_connection_closed(
    words: bytes, status: int
) -> None:
    async with serving() as (server, port):
        answer = await say(port, words)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        await until(lambda: server.connections == 0)
        assert server.counts.bad_requests == 1


async def test_a_failure_of_the_application_ends_its_own_request_only() -> None:
    async with serving() as (server, port):
        assert await say(port, REQUEST.replace(b"/one", b"/broken")) == b""
        assert b"200 OK" in await say(port, LAST)
        assert server.counts.failures == 1


async def test_a_client_that_does_not_finish_a_head_in_time_is_disconnected() -> None:
    async with serving(head_seconds=0.05) as (server, port):
        assert await say(port, b"GET / HTTP/1.1\r\nslow: ") == b""
        await until(lambda: server.connections == 0)


async def test_a_client_that_never_reads_does_not_hold_a_connection_forever() -> None:
    async with (
        serving(send_seconds=0.05) as (server, port),
        await trio.open_tcp_stream("127.0.0.1", port) as stream,
    ):
        await stream.send_all(REQUEST.replace(b"/one", b"/never"))
        await until(lambda: server.connections == 1)
        await until(lambda: server.connections == 0)


async def test_an_answer_without_end_ends_when_its_reader_goes() -> None:
    async with serving() as (server, port):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(REQUEST.replace(b"/one", b"/never"))
            await stream.receive_some(1000)
        await until(lambda: server.connections == 0)
        assert server.counts.failures == 0


async def test_more_connections_than_allowed_are_refused() -> None:
    async with serving(max_connections=1) as (server, port):
        async with await trio.open_tcp_stream("127.0.0.1", port) as first:
            await first.send_all(REQUEST)
            await first.receive_some(1000)
            refused = await say(port)
            assert refused.startswith(b"HTTP/1.1 503 ")
            parsed = h11.Connection(h11.CLIENT)
            parsed.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
            parsed.send(h11.EndOfMessage())
            parsed.receive_data(refused)
            while not isinstance(parsed.next_event(), h11.EndOfMessage):
                pass
        assert server.counts.refused_connections == 1
        await until(lambda: server.connections == 0)
        assert b"200 OK" in await say(port, LAST)


def test_one_address_has_only_so_many_connections_but_this_machine_as_many_as_it_likes() -> None:
    server = HttpServer(echo, max_connections=10, max_connections_of_one_address=2)
    server._open.update({"198.51.100.1": 2, "127.0.0.1": 5})
    assert not server._has_room("198.51.100.1")
    assert server._has_room("198.51.100.2")
    assert server._has_room("127.0.0.1")
    server._open["198.51.100.3"] += 3
    assert not server._has_room("127.0.0.1")


async def test_all_addresses_of_a_v6_network_together_have_the_connections_of_one_address() -> None:
    """A household has a /64, and a rented machine as well: 2^64 addresses."""
    server = HttpServer(echo, max_connections=512)
    async with trio.open_nursery() as nursery:
        for number in range(512):
            _, theirs = trio.testing.memory_stream_pair()
            theirs.socket = FakeSocket(f"2001:db8::{number:x}")  # type: ignore[attr-defined]
            nursery.start_soon(server.handle, theirs)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert server.connections == MAX_CONNECTIONS_OF_ONE_ADDRESS
        assert server._has_room("2001:db8:0:1::1"), "another household"
        nursery.cancel_scope.cancel()


class FakeSocket:
    """The socket of a connection from an address that this machine does not have."""

    def __init__(self, host: str) -> None:
        self._host = host

    def getpeername(self) -> tuple[str, int]:
        return self._host, 1

    def getsockname(self) -> tuple[str, int]:
        return "2001:db8:1::1", 80


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(st.binary(max_size=200), st.just(REQUEST)), max_size=6))
def test_no_bytes_end_the_server(parts: list[bytes]) -> None:
    async def main() -> None:
        async with serving() as (server, port):
            await say(port, *parts, end=True)
            assert b"200 OK" in await say(port, LAST)
            assert server.counts.failures == 0

    trio.run(main)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await trio.sleep(0.005)
