"""Binary multiaddrs from remotes, of the kinds that are dialled here.

Decoded by hand, because the bytes are untrusted: py-multiaddr raises TypeError and OverflowError
for some of them, and returns names unchanged, slashes included, so that one address could be made
to look like another in text.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from swarm_shared.addresses.dial_order import ip_of

MAX_NAME_BYTES: Final = 120
"""Longest DNS name. A circuit's address has two peer IDs behind it, and messages carry addresses of
300 characters at most; the name's length then fits one byte, too."""

_TCP: Final = 6
_IP_BYTES: Final = {4: 4, 41: 16}
_NAMES: Final = {53: "dns", 54: "dns4", 55: "dns6"}
_NAME: Final = re.compile(rb"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_PORT_BYTES: Final = 2


def unpack_address(packed: bytes) -> str | None:
    """Decode `/ip4|ip6|dns|dns4|dns6/…/tcp/…`; None for everything else."""
    kind, rest = packed[:1], packed[1:]
    if not kind:
        return None
    if kind[0] in _IP_BYTES:
        size = _IP_BYTES[kind[0]]
        if len(rest) < size:
            return None
        ip = ipaddress.ip_address(rest[:size])
        host = f"ip{ip.version}/{ip}"
    elif kind[0] in _NAMES and rest and rest[0] <= MAX_NAME_BYTES:
        size, rest = rest[0], rest[1:]
        name = rest[:size]
        if len(name) < size or not _NAME.fullmatch(name):
            return None
        host = f"{_NAMES[kind[0]]}/{name.decode('ascii')}"
    else:
        return None
    end = rest[size:]
    if len(end) != 1 + _PORT_BYTES or end[0] != _TCP:
        return None
    return f"/{host}/tcp/{int.from_bytes(end[1:], 'big')}"


def unpack_ip_address(packed: bytes) -> str | None:
    """Decode `/ip4|ip6/…/tcp/…`; None for everything else."""
    address = unpack_address(packed)
    return address if address is not None and ip_of(address) is not None else None
