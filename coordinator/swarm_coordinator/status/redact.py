"""Removes network addresses from text before it is published.

Notes are written for the organiser, and an error may contain the address that could not be reached.
Text that looks like an address is removed even if it is none, such as a version number with four
parts.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

REPLACEMENT = "(address)"

_REMEMBERED = 2048
"""Texts whose results are kept: every snapshot has the same hundreds of notes but for the newest,
and one note can take a millisecond."""

_MULTIADDR = re.compile(r"/(?:ip4|ip6|ip6zone|dns|dns4|dns6|dnsaddr)/\S*")
_IPV4 = re.compile(r"\d{1,3}(?:\s*\.\s*\d{1,3}){3}(?::\d{1,5})?")
_IPV6 = re.compile(r"\[?[0-9A-Fa-f:]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*(?:%\w+)?\]?(?::\d{1,5})?")


@lru_cache(_REMEMBERED)
def without_addresses(text: str) -> str:
    """Replace everything in `text` that looks like an address."""
    text = _MULTIADDR.sub(REPLACEMENT, text)
    # IPv6 first: an IPv6 address may end in an IPv4 one.
    text = _IPV6.sub(_redact_ipv6, text)
    return _IPV4.sub(REPLACEMENT, text)


def _redact_ipv6(found: re.Match[str]) -> str:
    """Replace an IPv6 address; keep a clock time such as 12:03:44, which has colons too."""
    text = found.group()
    core = text.strip("[]").split("%")[0]
    for candidate in (core, core.rstrip(".:"), core.lstrip(":"), core.rsplit("]", 1)[0]):
        try:
            ipaddress.IPv6Address(candidate)
        except ValueError:
            continue
        return REPLACEMENT
    # Not a single address, but maybe part of one or several joined. A clock time has no letters
    # beside its colons.
    return text if re.fullmatch(r"[\d:]*\d:\d\d", text) and "::" not in text else REPLACEMENT
