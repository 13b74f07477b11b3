"""Ports that a program keeps from one start to the next: invites, routers and peers name them."""

from __future__ import annotations

import errno
import random
import socket

from swarm_shared.base.errors import NetworkError

LASTING_PORTS = range(20_000, 32_768)
"""Ports below those that a system gives to outgoing connections and to programs that take any: on
Linux 32768 to 60999, on others 49152 and above (RFC 6335, section 6). One of these may be another
program's when this one starts again."""

_ATTEMPTS = 100


def lasting_port(host: str) -> int:
    """Return a free TCP port of one of this machine's addresses. NetworkError if there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason = ""
    for port in random.sample(LASTING_PORTS, _ATTEMPTS):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((host, port))
                return port
        except OSError as error:
            reason = str(error.strerror)
            if error.errno != errno.EADDRINUSE:
                break
    raise NetworkError(f"no free port on {host} ({reason}); choose another address to listen on")
