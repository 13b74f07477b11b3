"""Download of a file from an address that a remote chose.

The organiser names the addresses of shards, and a volunteer must not be made to send requests into
its own network: to a router, a printer, or a cloud's metadata service. So only https to globally
routable addresses is followed. A name is resolved once for each hop, all of its addresses are
checked, and the connection goes to a checked address, so that a second answer of the name server
cannot lead elsewhere. Redirects are followed here, each under the same rule.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, urljoin, urlsplit

STALL_SECONDS = 30.0
"""Seconds without data after which a download is abandoned."""
MAX_REDIRECTS = 5
PIECE_BYTES = 2**20

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

    def download(self, url: str, path: Path, size_bytes: int) -> None:
        """Write the file at `url`, which has exactly so many bytes, to `path`, synced.

        WebRefused when an address is not allowed or an answer is not that file, OSError when a
        connection fails.
        """
        # A new file: a download that was abandoned may still write to the old one.
        path.unlink(missing_ok=True)
        with self._answer(url) as answer, path.open("xb") as file:
            if answer.length is not None and answer.length != size_bytes:
                raise WebRefused(
                    f"the file has {answer.length} bytes, the manifest's has {size_bytes}"
                )
            left = size_bytes
            while left > 0 and (piece := answer.read(min(left, PIECE_BYTES))):
                file.write(piece)
                left -= len(piece)
            if left or answer.read(1):
                raise WebRefused("its size differs from the manifest's")
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def _answer(self, url: str) -> Iterator[http.client.HTTPResponse]:
        """The answer with the file, after redirects."""
        for _ in range(MAX_REDIRECTS + 1):
            target = self._parsed(url)
            connection = self._open(target)
            try:
                path = (target.path or "/") + (f"?{target.query}" if target.query else "")
                connection.request("GET", path, headers={"Accept-Encoding": "identity"})
                answer = connection.getresponse()
                location = answer.getheader("Location")
                if answer.status not in _REDIRECTS or location is None:
                    if answer.status != http.client.OK:
                        raise WebRefused(f"the server answers {answer.status}")
                    yield answer
                    return
                url = urljoin(url, location)
            except http.client.HTTPException as error:
                raise WebRefused(f"the server does not speak HTTP: {error!r}") from error
            finally:
                connection.close()
        raise WebRefused(f"more than {MAX_REDIRECTS} redirects")

    def _parsed(self, url: str) -> SplitResult:
        target = urlsplit(url)
        schemes = ("https", "http") if self.allow_private else ("https",)
        if target.scheme not in schemes:
            raise WebRefused(f"only {' and '.join(schemes)} addresses are followed")
        if not target.hostname or target.username is not None or not url.isascii():
            raise WebRefused("the address names no host, or more than a host")
        return target

    def _open(self, target: SplitResult) -> http.client.HTTPConnection:
        """A connection to one of the target's addresses, all of which have been checked."""
        host = target.hostname or ""
        port = target.port or _DEFAULT_PORTS[target.scheme]
        addresses = self.resolve(host, port)
        if not self.allow_private and not all(map(is_public, addresses)):
            raise WebRefused(f"{host} is not a public address; only those are followed")
        connection = http.client.HTTPConnection(host, port)
        connection.sock = self._connected(addresses, host, port, tls=target.scheme == "https")
        return connection

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
