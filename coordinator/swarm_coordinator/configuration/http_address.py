"""Where the pages are served: an address in run.toml's spelling, and a bound socket.

The coordinator binds, before its process of pages exists: so it knows the port, says so, and keeps
it over every restart of that process; who comes in between waits in the backlog.
"""

from __future__ import annotations

import contextlib
import re
import socket
from dataclasses import dataclass

from swarm_shared.base.errors import ConfigurationError, NetworkError

BACKLOG = 128
_FORM = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.%]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class HttpAddress:
    host: str
    port: int
    """0: any free one."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """As somebody on this machine would type it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{HttpAddress(host, self.port)}/"


def parse_address(text: str) -> HttpAddress:
    """`127.0.0.1:8080`, `[::1]:8080`, `localhost:0`. ConfigurationError for anything else."""
    found = _FORM.fullmatch(text.strip())
    if found is None or int(found["port"]) > 65_535:
        raise ConfigurationError(
            f"{text!r} is no address to serve pages at; write HOST:PORT, for example "
            "127.0.0.1:8080, or 127.0.0.1:0 for a free port"
        )
    return HttpAddress(found["six"] or found["host"], int(found["port"]))


def listen(address: HttpAddress) -> socket.socket:
    """A listening socket. NetworkError says why there is none."""
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
            f"the pages cannot be served at {address} ({error.strerror or error})"
        ) from error
    return made


def address_of(listener: socket.socket) -> HttpAddress:
    host, port = listener.getsockname()[:2]
    return HttpAddress(str(host), int(port))
