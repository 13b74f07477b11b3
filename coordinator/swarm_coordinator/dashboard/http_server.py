"""HTTP/1.1 on a public port: uvicorn's protocol, with deadlines and bounds for each connection.

uvicorn and h11 speak HTTP; this module owns sockets and time, and is the one door to uvicorn. It
accepts connections itself, because uvicorn's own server does not limit them, and learns of one over
TLS only when its handshake is complete.

    a client that is slow at    is disconnected after
    the handshake of TLS        HEAD_SECONDS
    sending a request's head    HEAD_SECONDS, even if bytes keep arriving
    sending a body              BODY_SECONDS; more than MAX_BODY_BYTES is refused at once
    reading a response          SEND_SECONDS for each part
    sending the next request    HEAD_SECONDS
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.client import responses

import anyio
import anyio.lowlevel
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

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
machine and to trusted proxies, from which all clients of a reverse proxy connect."""
RESERVED_CONNECTIONS = 64
"""Further ones for this machine alone: its browser and its monitoring are answered also while other
machines have all others."""
END_SECONDS = 1.0
"""Limit for requests in progress to notice that the server has closed their connections."""


@dataclass(slots=True, eq=False)
class HttpServer:
    """Serves an ASGI application on a listener, with bounded connections, under asyncio."""

    application: ASGIApp
    tls: ssl.SSLContext | None = None
    proxies: tuple[str, ...] = ()
    """Addresses and networks whose X-Forwarded-For is believed."""
    max_connections: int = MAX_CONNECTIONS
    max_connections_of_one_address: int = MAX_CONNECTIONS_OF_ONE_ADDRESS
    reserved_connections: int = RESERVED_CONNECTIONS
    head_seconds: float = HEAD_SECONDS
    body_seconds: float = BODY_SECONDS
    send_seconds: float = SEND_SECONDS
    max_requests: int = MAX_REQUESTS
    refused_connections: int = 0
    bad_requests: int = 0
    failures: int = 0
    """Requests that ended in an unexpected error."""
    state: ServerState = field(default_factory=ServerState, init=False)
    config: Config = field(init=False)
    _open: Counter[str] = field(default_factory=Counter, init=False)
    _requests: Counter[str] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        self.config = Config(
            self._limited, http=_Connection, ws="none", lifespan="off", interface="asgi3",
            log_config=None, log_level="error", access_log=False,
            forwarded_allow_ips=list(self.proxies), h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )  # fmt: skip
        self.config.load()

    @property
    def connections(self) -> int:
        return self._open.total()

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            async with anyio.create_task_group() as connections:
                while True:
                    try:
                        accepted, address = await loop.sock_accept(listener)
                    except OSError as error:  # such as too many open files
                        log.warning("a connection could not be accepted: %s", error)
                        await anyio.sleep(0.1)
                        continue
                    connections.start_soon(self.handle, accepted, plain_address(address[0]))
                    # `sock_accept` returns at once while connections wait.
                    await anyio.lowlevel.checkpoint()
        finally:  # what asyncio cancels at its end, uvicorn would log as a failure
            with anyio.move_on_after(END_SECONDS, shield=True):
                await asyncio.gather(*self.state.tasks, return_exceptions=True)

    async def handle(self, accepted: socket.socket, address: str) -> None:
        """Serve one connection to its end."""
        reserved = self.reserved_connections if is_this_machine(address) else 0
        is_full = self.connections >= self.max_connections + reserved
        if is_full or not self._has_room(address, self._open):
            self.refused_connections += 1
            with accepted, suppress(OSError):
                if self.tls is None:  # an answer over TLS would cost more than the limit saves
                    accepted.send(_encoded(BUSY))
            return
        connection = _Connection(self, address)
        with counted(self._open, address_group(address)):
            try:
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: connection, accepted, ssl=self.tls,
                    ssl_handshake_timeout=self.head_seconds if self.tls else None,
                    ssl_shutdown_timeout=self.send_seconds if self.tls else None,
                )  # fmt: skip
                await connection.closed.wait()
            except OSError:  # no handshake of TLS
                self.bad_requests += 1
            finally:
                connection.abort()

    def _has_room(self, address: str, counter: Counter[str]) -> bool:
        if is_this_machine(address) or address in self.config.loaded_app.trusted_hosts:
            return True
        return counter[address_group(address)] < self.max_connections_of_one_address

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Behind a trusted proxy it counts as a connection of its client."""
        self.state.default_headers[:] = [(b"date", formatdate(usegmt=True).encode())]
        address = str(scope["client"][0])
        if not self._has_room(address, self._requests):
            self.refused_connections += 1
            await BUSY(scope, receive, send)
            return
        with counted(self._requests, address_group(address)):
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application with a whole body. uvicorn answers and logs its failures."""
        body, more_body = bytearray(), True
        with anyio.move_on_after(self.body_seconds):
            while more_body and len(body) <= MAX_BODY_BYTES:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                body += message["body"]
                more_body = message["more_body"]
        if more_body or len(body) > MAX_BODY_BYTES:
            self.bad_requests += 1
            refusal = _no_request(413 if len(body) > MAX_BODY_BYTES else 408)
            await refusal(scope, receive, send)
            return
        requests: list[Message] = [{"type": "http.request", "body": bytes(body)}]

        async def receive_whole() -> Message:
            return requests.pop() if requests else await receive()

        async def send_fairly(message: Message) -> None:
            await send(message)  # returns at once, also when the client has left
            await anyio.lowlevel.checkpoint()

        try:
            await self.application(scope, receive_whole, send_fairly)
        except Exception:
            self.failures += 1
            raise


class _Connection(H11Protocol):
    """One connection. uvicorn's timer for kept connections limits the time for a head here."""

    def __init__(self, server: HttpServer, address: str) -> None:
        super().__init__(server.config, server.state, {})
        self.timeout_keep_alive = server.head_seconds  # type: ignore[assignment] # of call_later
        self.closed = anyio.Event()
        self._bounds = server
        self._address = address
        self._answered = 0
        self._send_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client = (self._address, 0)
        if self.server is not None:
            self.server = (plain_address(self.server[0]), self.server[1])
        # Anything unsent pauses writing. asyncio's TLS pauses at its limit, not above it.
        transport.set_write_buffer_limits(high=0 if self._bounds.tls is None else 1, low=0)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        """Take bytes. In uvicorn any byte ends the time for a head, here a whole head does."""
        # In parts, because h11 accepts a head of any length that it receives at once.
        for begin in range(0, len(data), MAX_HEAD_BYTES):
            if not self.transport.is_closing():
                self.conn.receive_data(data[begin : begin + MAX_HEAD_BYTES])
                self.handle_events()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_deadline = self.loop.call_later(self._bounds.send_seconds, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_deadline is not None:
            self._send_deadline.cancel()

    def on_response_complete(self) -> None:
        self._answered += 1
        if self._answered >= self._bounds.max_requests:
            self.transport.close()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request. uvicorn calls this while it handles h11's error."""
        self._bounds.bad_requests += 1
        status = getattr(sys.exception(), "error_status_hint", 400)
        self.transport.write(_encoded(_no_request(status)))
        self.transport.close()

    def abort(self) -> None:
        if self.transport is not None and not self.closed.is_set():
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if exc is not None and not isinstance(exc, OSError):
            self._bounds.failures += 1
        self.closed.set()


@contextmanager
def counted(counter: Counter[str], key: str) -> Iterator[None]:
    """Count during the block; keys that count nothing are not kept."""
    counter[key] += 1
    try:
        yield
    finally:
        counter[key] -= 1
        if not counter[key]:
            del counter[key]


def plain_address(host: str) -> str:
    """Return an IPv4 address as such, which a socket for both versions maps into IPv6."""
    return host.removeprefix("::ffff:")


def is_this_machine(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:
        return False


BUSY = JSONResponse(
    {"error": "too many connections; come again"}, 503, {"retry-after": "5", "connection": "close"}
)


def _no_request(status: int) -> JSONResponse:
    problem = {"error": "this request cannot be answered"}
    return JSONResponse(problem, status, {"connection": "close"})


def _encoded(answer: JSONResponse) -> bytes:
    """Encode a response to no request."""
    lines = [f"HTTP/1.1 {answer.status_code} {responses[answer.status_code]}".encode()]
    lines += [name + b": " + value for name, value in answer.raw_headers]
    return b"\r\n".join((*lines, b"", bytes(answer.body)))
