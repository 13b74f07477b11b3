"""Download of ranges of a file from an address that a remote chose.

The organiser names the addresses of shards, and a volunteer must not be made to send requests into
its own network: to a router, a printer, or a cloud's metadata service. So only https to globally
routable addresses is followed. A name is resolved once for each hop, all of its addresses are
checked, and the connection goes to a checked address, so that a second answer of the name server
cannot lead elsewhere; a connection that is kept open stays at that address. Redirects are
followed here, each under the same rule.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urljoin, urlsplit

STALL_SECONDS = 30.0
"""Seconds without data after which a download is abandoned."""
MAX_REDIRECTS = 5
MAX_IDLE_CONNECTIONS = 16
"""Connections kept open between requests: those of eight requests at once, with one redirect."""
PIECE_BYTES = 2**16
"""Most bytes of the body of a redirect; with more, the connection is closed."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_DEFAULT_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""IPv4 addresses behind a translator (RFC 6052)."""

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], list[str]]
Connect = Callable[[str, int], socket.socket]


class WebRefused(ValueError):
    """An address is not followed, or an answer is not taken."""


def resolve_name(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host, in the system's order. OSError when it has none."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def connect_to(ip: str, port: int) -> socket.socket:
    """Connect to an IP address; no name is looked up."""
    return socket.create_connection((ip, port), timeout=STALL_SECONDS)


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


@dataclass(frozen=True, slots=True)
class WebClient:
    """Downloads under one rule."""

    allow_private: bool = False
    """Whether http, and addresses in private networks and on this machine, are followed."""
    resolve: Resolve = resolve_name
    connect: Connect = connect_to
    tls: ssl.SSLContext = field(default_factory=ssl.create_default_context)

    def open(self, target: SplitResult) -> http.client.HTTPConnection:
        """Connect to one of the target's addresses, all of which are checked. WebRefused when one
        is not allowed, OSError when none answers."""
        host = target.hostname or ""
        port = target.port or _DEFAULT_PORTS[target.scheme]
        addresses = self.resolve(host, port)
        if not self.allow_private and not all(map(is_public, addresses)):
            raise WebRefused(f"{host} is not a public address; only those are followed")
        connection = http.client.HTTPConnection(host, port)
        # A connection that the server closed is never opened again by itself, unchecked.
        connection.auto_open = 0
        connection.sock = self._connected(addresses, host, port, tls=target.scheme == "https")
        return connection

    def parsed(self, url: str) -> SplitResult:
        target = urlsplit(url)
        schemes = ("https", "http") if self.allow_private else ("https",)
        if target.scheme not in schemes:
            raise WebRefused(f"only {' and '.join(schemes)} addresses are followed")
        if not target.hostname or target.username is not None or not url.isascii():
            raise WebRefused("the address names no host, or more than a host")
        return target

    def _connected(self, addresses: list[str], host: str, port: int, *, tls: bool) -> socket.socket:
        failure = OSError(f"{host} has no address")
        for ip in addresses:
            try:
                plain = self.connect(ip, port)
            except OSError as error:
                failure = error
                continue
            if not tls:
                return plain
            try:
                return self.tls.wrap_socket(plain, server_hostname=host)
            except OSError:
                plain.close()
                raise
        raise failure


class WebConnections:
    """Range requests over connections that are kept open; safe to use from several threads."""

    def __init__(self, client: WebClient) -> None:
        self._client = client
        self._idle: dict[tuple[str, str], list[http.client.HTTPConnection]] = {}
        """By scheme and host: each has been checked when it was opened."""
        self._lock = threading.Lock()

    def read_range(self, url: str, start: int, size_bytes: int) -> bytes:
        """Return exactly so many bytes of the file at `url`, after redirects. Blocking.

        WebRefused when an address is not allowed or the answer is not that range, OSError when a
        connection fails.
        """
        for _ in range(MAX_REDIRECTS + 1):
            target = self._client.parsed(url)
            found = self._answered(target, start, size_bytes)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise WebRefused(f"more than {MAX_REDIRECTS} redirects")

    def close(self) -> None:
        with self._lock:
            for connections in self._idle.values():
                for connection in connections:
                    connection.close()
            self._idle.clear()

    def _answered(self, target: SplitResult, start: int, size_bytes: int) -> bytes | str:
        """The bytes, or where the server redirects to."""
        key = (target.scheme, target.netloc)
        with self._lock:
            kept = self._idle.get(key)
            connection = kept.pop() if kept else None
        if connection is not None:
            try:
                return self._asked(connection, key, target, start, size_bytes)
            except (OSError, http.client.HTTPException):
                # The server closed it while it was idle; a new one shows whether it still answers.
                connection.close()
        try:
            return self._asked(self._client.open(target), key, target, start, size_bytes)
        except http.client.HTTPException as error:
            raise WebRefused(f"the server does not speak HTTP: {error!r}") from error

    def _asked(
        self, connection: http.client.HTTPConnection, key: tuple[str, str], target: SplitResult,
        start: int, size_bytes: int,
    ) -> bytes | str:  # fmt: skip
        whole = False
        try:
            path = (target.path or "/") + (f"?{target.query}" if target.query else "")
            span = f"bytes={start}-{start + size_bytes - 1}"
            connection.request("GET", path, headers={"Accept-Encoding": "identity", "Range": span})
            answer = connection.getresponse()
            location = answer.getheader("Location")
            found: bytes | str
            if answer.status in _REDIRECTS and location is not None:
                found = location
                whole = len(answer.read(PIECE_BYTES)) < PIECE_BYTES
            else:
                found = _range_of(answer, start, size_bytes)
                whole = True
        finally:
            if not whole or answer.will_close:
                connection.close()
        self._keep(key, connection)
        return found

    def _keep(self, key: tuple[str, str], connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if connection.sock is None:
                return
            if sum(map(len, self._idle.values())) < MAX_IDLE_CONNECTIONS:
                self._idle.setdefault(key, []).append(connection)
                return
        connection.close()


def _range_of(answer: http.client.HTTPResponse, start: int, size_bytes: int) -> bytes:
    if answer.status == http.client.OK:
        raise WebRefused("the server does not answer Range requests")
    if answer.status != http.client.PARTIAL_CONTENT:
        raise WebRefused(f"the server answers {answer.status}")
    given = answer.getheader("Content-Range") or ""
    if not given.startswith(f"bytes {start}-{start + size_bytes - 1}/"):
        raise WebRefused(f"the server sends another range: {given[:80]!r}")
    content = answer.read(size_bytes + 1)
    if len(content) != size_bytes:
        raise WebRefused(f"the range has {len(content)} bytes instead of {size_bytes}")
    return content
