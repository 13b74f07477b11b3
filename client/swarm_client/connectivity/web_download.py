"""Download of ranges of a file from an address that a remote chose.

The organiser names the addresses of shards, and a volunteer must not be made to send requests into
its own network: to a router, a printer, or a cloud's metadata service. So only https to globally
routable addresses is followed. A name is resolved once for each hop, all of its addresses are
checked, and the connection goes to a checked address, so that a second answer of the name server
cannot lead elsewhere; a connection that is kept open stays at that address. Redirects are
followed here, each under the same rule. HTTP and the kept connections are httpcore's.

The server may be hostile as well. httpcore limits the time of one read only, and reads any number
of interim answers: a server that sends these without end, or a byte now and then, would keep a
thread of the daemon busy for as long as it likes. So all reads of a range have one limit of time
and one of bytes.
"""

from __future__ import annotations

import http
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore

RANGE_SECONDS = 30.0
"""Longest time of a range with its redirects, in seconds; a mirror that takes 20 s rests."""
OVERHEAD_BYTES = 2**18
"""Most bytes beside the range: headers, and bodies of redirects."""
MAX_REDIRECTS = 5
MAX_IDLE_CONNECTIONS = 16
"""Connections kept open between requests: those of eight requests at once, with one redirect."""
PIECE_BYTES = 2**16
"""Most bytes of the body of a redirect; with more, the connection is closed."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""IPv4 addresses behind a translator (RFC 6052)."""

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], list[str]]


class WebRefused(ValueError):
    """An address is not followed, or an answer is not taken."""


def resolve_name(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host, in the system's order. OSError when it has none."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def is_public(text: str) -> bool:
    """Whether this IP address means one machine on the internet, outside every private network."""
    try:
        ip: IpAddress = ipaddress.ip_address(text)
    except ValueError:
        return False  # with a zone, so link-local
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.teredo is not None:
            return False
        if ip in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        embedded = ip.ipv4_mapped or ip.sixtofour
        if embedded is not None:
            return is_public(str(embedded))
        if ip.is_site_local:
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


class _Limits(threading.local):
    """The time and the bytes that are left to the range that this thread reads."""

    until: float = 0.0
    left_bytes: int = 0

    def begin(self, size_bytes: int) -> None:
        self.until = time.monotonic() + RANGE_SECONDS
        self.left_bytes = size_bytes + OVERHEAD_BYTES

    def seconds(self) -> float:
        seconds_left = self.until - time.monotonic()
        if seconds_left <= 0:
            raise httpcore.ReadTimeout(f"the range took more than {RANGE_SECONDS:g} s")
        return seconds_left

    def received(self, content: bytes) -> bytes:
        self.left_bytes -= len(content)
        if self.left_bytes < 0:
            raise WebRefused("the server sends far more than the range")
        return content


class _LimitedStream(httpcore.NetworkStream):
    """A connection whose reads and writes count against the range that the thread reads."""

    def __init__(self, stream: httpcore.NetworkStream, limits: _Limits) -> None:
        self._stream, self._limits = stream, limits

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._limits.received(self._stream.read(max_bytes, self._limits.seconds()))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._limits.seconds())

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:  # fmt: skip
        left = self._limits.seconds()
        inner = self._stream.start_tls(ssl_context, server_hostname, left)
        return _LimitedStream(inner, self._limits)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _CheckedAddresses(httpcore.NetworkBackend):
    """Connects to a host's addresses, all of which are checked, unless private ones are allowed."""

    def __init__(
        self, allow_private: bool, resolve: Resolve, network: httpcore.NetworkBackend,
        limits: _Limits,
    ) -> None:  # fmt: skip
        self._limits = limits
        self._allow_private = allow_private
        self._resolve = resolve
        self._network = network

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:  # fmt: skip
        """WebRefused when an address is not allowed, OSError or httpcore's error when none
        answers."""
        addresses = self._resolve(host, port)
        if not self._allow_private and not all(map(is_public, addresses)):
            raise WebRefused(f"{host} is not a public address; only those are followed")
        failure: Exception = OSError(f"{host} has no address")
        for ip in addresses:
            try:
                stream = self._network.connect_tcp(
                    ip, port, self._limits.seconds(), local_address, socket_options
                )
                return _LimitedStream(stream, self._limits)
            except (httpcore.NetworkError, httpcore.TimeoutException) as error:
                failure = error
        raise failure


class WebClient:
    """Range requests over connections that are kept open; safe to use from several threads."""

    def __init__(
        self,
        *,
        allow_private: bool = False,
        resolve: Resolve = resolve_name,
        network: httpcore.NetworkBackend | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`allow_private`: whether http, and addresses in private networks and on this machine, are
        followed."""
        self._schemes = ("https", "http") if allow_private else ("https",)
        self._limits = _Limits()
        self._pool = httpcore.ConnectionPool(
            tls or ssl.create_default_context(),
            max_connections=None,
            max_keepalive_connections=MAX_IDLE_CONNECTIONS,
            network_backend=_CheckedAddresses(
                allow_private, resolve, network or httpcore.SyncBackend(), self._limits
            ),
        )

    def read_range(self, url: str, start: int, size_bytes: int) -> bytes:
        """Return exactly so many bytes of the file at `url`, after redirects. Blocking.

        WebRefused when an address is not allowed or the answer is not that range, OSError when a
        connection fails or RANGE_SECONDS are over.
        """
        self._limits.begin(size_bytes)
        for _ in range(MAX_REDIRECTS + 1):
            self._check(url)
            try:
                found = self._answered(url, start, size_bytes)
            except (httpcore.NetworkError, httpcore.TimeoutException) as error:
                raise ConnectionError(str(error) or repr(error)) from error
            except httpcore.ProtocolError as error:
                raise WebRefused(f"the server does not speak HTTP: {error!r}") from error
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise WebRefused(f"more than {MAX_REDIRECTS} redirects")

    def _check(self, url: str) -> None:
        target = urlsplit(url)
        if target.scheme not in self._schemes:
            raise WebRefused(f"only {' and '.join(self._schemes)} addresses are followed")
        if not target.hostname or target.username is not None or not url.isascii():
            raise WebRefused("the address names no host, or more than a host")

    def _answered(self, url: str, start: int, size_bytes: int) -> bytes | str:
        """The bytes, or where the server redirects to."""
        try:
            return self._asked(url, start, size_bytes)
        except (httpcore.ReadError, httpcore.WriteError, httpcore.RemoteProtocolError):
            # The server may have closed a kept connection at this moment.
            return self._asked(url, start, size_bytes)

    def _asked(self, url: str, start: int, size_bytes: int) -> bytes | str:
        span = f"bytes={start}-{start + size_bytes - 1}"
        headers = [("Accept-Encoding", "identity"), ("Range", span)]
        # What is not read to its end is closed when the block is left.
        with self._pool.stream("GET", url, headers=headers) as answer:
            location = _header(answer, b"location")
            if answer.status in _REDIRECTS and location:
                _read(answer, PIECE_BYTES)
                return location
            return _range_of(answer, start, size_bytes)


def _header(answer: httpcore.Response, name: bytes) -> str:
    found = (value for key, value in answer.headers if key.lower() == name)
    return next(found, b"").decode("latin-1")


def _read(answer: httpcore.Response, most_bytes: int) -> bytes:
    """The body, or more than `most_bytes` of it."""
    content = bytearray()
    for part in answer.iter_stream():
        content += part
        if len(content) > most_bytes:
            break
    return bytes(content)


def _range_of(answer: httpcore.Response, start: int, size_bytes: int) -> bytes:
    if answer.status == http.HTTPStatus.OK:
        raise WebRefused("the server does not answer Range requests")
    if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
        raise WebRefused(f"the server answers {answer.status}")
    given = _header(answer, b"content-range")
    if not given.startswith(f"bytes {start}-{start + size_bytes - 1}/"):
        raise WebRefused(f"the server sends another range: {given[:80]!r}")
    content = _read(answer, size_bytes)
    if len(content) != size_bytes:
        raise WebRefused(f"the range has {len(content)} bytes instead of {size_bytes}")
    return content
