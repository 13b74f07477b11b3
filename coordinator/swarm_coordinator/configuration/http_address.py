"""The address of the dashboard, its listening socket, and its certificate.

The coordinator binds the socket before it starts the dashboard process. So it knows and reports the
port, and keeps it over restarts of that process; requests in between wait in the backlog.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from swarm_shared.base.errors import ConfigurationError, NetworkError

BACKLOG = 128
"""Connections that wait while the dashboard process is restarted."""
_FORM = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.%]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """A host and a port to listen on."""

    host: str
    port: int
    """0: any free port."""
    tls: bool = False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL by which a browser on this machine reaches the address."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http{'s' if self.tls else ''}://{HttpAddress(host, self.port)}/"


def parse_address(text: str) -> HttpAddress:
    """Parse `127.0.0.1:8080`, `[::1]:8080` or `localhost:0`; ConfigurationError for anything
    else."""
    found = _FORM.fullmatch(text.strip())
    if found is None or int(found["port"]) > 65_535:
        raise ConfigurationError(
            f"{text!r} is not an address for the dashboard; write HOST:PORT, for example "
            "127.0.0.1:8080, or 127.0.0.1:0 for a free port"
        )
    return HttpAddress(found["six"] or found["host"], int(found["port"]))


def listen(address: HttpAddress) -> socket.socket:
    """Return a listening socket; NetworkError when the address cannot be used."""
    made: socket.socket | None = None
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
        made.listen(BACKLOG)
    except OSError as error:
        if made is not None:
            with contextlib.suppress(OSError):
                made.close()
        raise NetworkError(
            f"the dashboard cannot be served at {address} ({error.strerror or error})"
        ) from error
    return made


def address_of(listener: socket.socket) -> HttpAddress:
    """Return the address of a bound socket."""
    host, port = listener.getsockname()[:2]
    return HttpAddress(str(host), int(port))


def tls_context(folder: Path, certificate: str, key: str) -> ssl.SSLContext | None:
    """Return what TLS needs, or None without a certificate; paths are relative to `folder`."""
    if not certificate:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password given here, OpenSSL asks for one at the terminal.
        context.load_cert_chain(folder / certificate, folder / key, password="")
    except OSError as error:
        raise ConfigurationError(
            f"[http] certificate and key in run.toml cannot be used ({error.strerror}); "
            f"{folder / certificate} and {folder / key} must be readable files in PEM that belong "
            "together, the key without a password"
        ) from error
    return context
