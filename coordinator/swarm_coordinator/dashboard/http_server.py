"""HTTP/1.1 over trio for an ASGI application: every connection has deadlines and bounds.

h11 implements the protocol; this module owns sockets and time. A ready-made server was measured
against the needs of a public port and does not fit: it shields writes from cancellation, so a
client that never reads holds its connection forever, it cannot limit connections, and it offers
HTTP/2 and websockets, which are not needed here.

    a client that is slow at    is disconnected after
    sending a request's head    HEAD_SECONDS, even if bytes keep arriving
    sending a body              BODY_SECONDS; more than MAX_BODY_BYTES is refused at once
    reading a response          SEND_SECONDS for each part
    sending the next request    HEAD_SECONDS
"""

from __future__ import annotations

import ipaddress
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.client import responses
from typing import Any
from urllib.parse import unquote

import h11
import trio

from swarm_shared.base.endpoint import address_group

log = logging.getLogger(__name__)

HEAD_SECONDS = 10.0
BODY_SECONDS = 10.0
SEND_SECONDS = 20.0
MAX_HEAD_BYTES = 16 * 1024
MAX_BODY_BYTES = 64 * 1024
MAX_REQUESTS = 1_000
"""Requests on one connection, so that no client keeps one forever."""
MAX_CONNECTIONS = 512
MAX_CONNECTIONS_OF_ONE_ADDRESS = 32
"""Connections from one IPv4 address or one IPv6 /64; a browser opens six. Does not apply to this
machine, from which all clients of a reverse proxy connect."""
_RECEIVE_BYTES = 16 * 1024

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]


class ClientDisconnected(OSError):
    """The client has disconnected or does not read."""


@dataclass(slots=True)
class ServerCounters:
    """Counters of connections and requests, for the metrics."""

    refused_connections: int = 0
    bad_requests: int = 0
    failures: int = 0
    """Requests that ended in an unexpected error."""


@dataclass(slots=True, eq=False)
class HttpServer:
    """Serves an ASGI application on a listener, with bounded connections."""

    application: Application
    max_connections: int = MAX_CONNECTIONS
    max_connections_of_one_address: int = MAX_CONNECTIONS_OF_ONE_ADDRESS
    head_seconds: float = HEAD_SECONDS
    send_seconds: float = SEND_SECONDS
    counts: ServerCounters = field(default_factory=ServerCounters)
    _open: Counter[str] = field(default_factory=Counter)

    @property
    def connections(self) -> int:
        return self._open.total()

    async def serve(self, listener: trio.SocketListener) -> None:
        """Accept connections until cancelled."""
        await trio.serve_listeners(self.handle, [listener])

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve one connection to its end. Its errors affect no other connection."""
        try:
            address = str(stream.socket.getpeername()[0])
        except OSError:
            address = ""
        group = address_group(address)
        async with stream:
            if not self._has_room(address):
                self.counts.refused_connections += 1
                with trio.move_on_after(1.0):
                    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                        await stream.send_all(_BUSY)
                return
            self._open[group] += 1
            try:
                await _Connection(self, stream, address).run()
            except (ClientDisconnected, trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            except Exception:  # a supervisor: an error in one request must not end the others
                self.counts.failures += 1
                log.exception("a request could not be answered")
            finally:
                self._open[group] -= 1
                if not self._open[group]:
                    del self._open[group]

    def _has_room(self, address: str) -> bool:
        if self.connections >= self.max_connections:
            return False
        if is_this_machine(address):
            return True
        return self._open[address_group(address)] < self.max_connections_of_one_address


def is_this_machine(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:
        return False


def _own_address(stream: trio.SocketStream) -> str:
    """Return the address of this machine that a client has connected to."""
    try:
        return str(stream.socket.getsockname()[0]).removeprefix("::ffff:")
    except OSError:
        return ""


class _Connection:
    def __init__(self, server: HttpServer, stream: trio.SocketStream, address: str) -> None:
        self._server = server
        self.application = server.application
        self._stream = stream
        self._address = address
        self._own_address = _own_address(stream)
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)

    async def run(self) -> None:
        for _ in range(MAX_REQUESTS):
            try:
                request = await self._head()
                if request is None:
                    return
                await _Exchange(self, request, await self._body()).run(self._scope(request))
            except h11.RemoteProtocolError as error:
                self._server.counts.bad_requests += 1
                await self._refuse(error)
                return
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return
            self._http.start_next_cycle()

    async def _head(self) -> h11.Request | None:
        """The next request; None when there is none in time."""
        with trio.move_on_after(self._server.head_seconds):
            event = await self._next_event()
            return event if isinstance(event, h11.Request) else None
        return None

    async def _body(self) -> bytes:
        body = bytearray()
        with trio.move_on_after(BODY_SECONDS):
            while True:
                event = await self._next_event()
                if isinstance(event, h11.EndOfMessage):
                    return bytes(body)
                if not isinstance(event, h11.Data):
                    raise ClientDisconnected("the request ended in its body")
                body += event.data
                if len(body) > MAX_BODY_BYTES:
                    raise h11.RemoteProtocolError("the body is too long", error_status_hint=413)
        raise h11.RemoteProtocolError("the body took too long", error_status_hint=408)

    async def _next_event(self) -> h11.Event | type[h11.PAUSED]:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event  # type: ignore[return-value]
            if self._http.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[])
                await self.send_bytes(self._http.send(go_on) or b"")
            self._http.receive_data(await self._stream.receive_some(_RECEIVE_BYTES))

    async def watch(self) -> None:
        """Return when the client has disconnected. Data received meanwhile is the next request."""
        data = await self._stream.receive_some(_RECEIVE_BYTES)
        while data and len(self._http.trailing_data[0]) < MAX_HEAD_BYTES:
            self._http.receive_data(data)
            data = await self._stream.receive_some(_RECEIVE_BYTES)
        if data:  # more than one request ahead: not read until this one is answered
            self._http.receive_data(data)
            await trio.sleep_forever()

    async def send(self, *events: h11.Event) -> None:
        await self.send_bytes(b"".join(self._http.send(event) or b"" for event in events))

    async def send_bytes(self, content: bytes) -> None:
        if not content:
            return
        with trio.move_on_after(self._server.send_seconds):
            try:
                await self._stream.send_all(content)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise ClientDisconnected("the connection is closed") from error
            return
        raise ClientDisconnected("the client does not read")

    async def _refuse(self, error: h11.RemoteProtocolError) -> None:
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        text = b'{"error":"this request cannot be answered"}'
        await self.send(
            h11.Response(
                status_code=error.error_status_hint,
                headers=[
                    ("content-type", "application/json"), ("content-length", str(len(text))),
                    ("connection", "close"),
                ],
            ),
            h11.Data(data=text),
            h11.EndOfMessage(),
        )  # fmt: skip

    def _scope(self, request: h11.Request) -> Message:
        target, _, query = request.target.partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": request.http_version.decode("ascii"),
            "method": request.method.decode("ascii"),
            "scheme": "http",
            "path": unquote(target.decode("ascii", "replace")),
            "raw_path": target,
            "query_string": query,
            "root_path": "",
            "headers": [(bytes(name), bytes(value)) for name, value in request.headers],
            "client": (self._address, 0),
            "server": (self._own_address, 0),
            "state": {},
        }


class _Exchange:
    """One request and its response, as ASGI messages."""

    def __init__(self, connection: _Connection, request: h11.Request, body: bytes) -> None:
        self._connection = connection
        self._body: bytes | None = body
        self._without_body = request.method == b"HEAD"
        self._head: h11.Response | None = None
        self._ended = False

    async def run(self, scope: Message) -> None:
        """Run the application; cancel it if the client disconnects before the response ends."""
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, nursery.cancel_scope)
            try:
                await self._connection.application(scope, self._receive, self._send)
            except Exception as error:  # noqa: BLE001 (raised below, outside the nursery's group)
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if not self._ended:
            raise ClientDisconnected("the client left before its response was complete")

    async def _watch(self, scope: trio.CancelScope) -> None:
        with suppress(h11.RemoteProtocolError, trio.BrokenResourceError, trio.ClosedResourceError):
            await self._connection.watch()
        scope.cancel()

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        # An application that waits for the disconnect is cancelled by it.
        await trio.sleep_forever()

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = h11.Response(
                status_code=message["status"],
                headers=[*message["headers"], (b"date", formatdate(usegmt=True).encode())],
                reason=responses.get(message["status"], "").encode(),
            )
            return
        events: list[h11.Event] = []
        if self._head is not None:
            events.append(self._head)
            self._head = None
        if message.get("body") and not self._without_body:
            events.append(h11.Data(data=message["body"]))
        if not message.get("more_body", False):
            events.append(h11.EndOfMessage())
            self._ended = True
        await self._connection.send(*events)


_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 5\r\n"
    b'content-length: 44\r\nconnection: close\r\n\r\n{"error":"too many connections; come again"}'
)
