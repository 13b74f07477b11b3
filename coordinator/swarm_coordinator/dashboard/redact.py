"""Takes network addresses out of a sentence before everybody may read it.

Notes are written for the organiser, and an error may name the address that could not be reached.
What looks like an address is taken out even where it is none: a version number with four parts is
no loss.
"""

from __future__ import annotations

import ipaddress
import re

REPLACEMENT = "(address)"

_MULTIADDR = re.compile(r"/(?:ip4|ip6|ip6zone|dns|dns4|dns6|dnsaddr)/\S*")
_IPV4 = re.compile(r"\d{1,3}(?:\s*\.\s*\d{1,3}){3}(?::\d{1,5})?")
_IPV6 = re.compile(r"\[?[0-9A-Fa-f:]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*(?:%\w+)?\]?(?::\d{1,5})?")


def without_addresses(text: str) -> str:
    text = _MULTIADDR.sub(REPLACEMENT, text)
    # Six before four: an IPv6 address may end in an IPv4 one.
    text = _IPV6.sub(_redact_ipv6, text)
    return _IPV4.sub(REPLACEMENT, text)


def _redact_ipv6(found: re.Match[str]) -> str:
    """Clock times such as 12:03:44 have colons as well."""
    text = found.group()
    core = text.strip("[]").split("%")[0]
    for candidate in (core, core.rstrip(".:"), core.lstrip(":"), core.rsplit("]", 1)[0]):
        try:
            ipaddress.IPv6Address(candidate)
        except ValueError:
            continue
        return REPLACEMENT
    # Not one address by itself: part of one, or several run together. Letters and colons beside
    # each other are no clock time.
    return text if re.fullmatch(r"[\d:]*\d:\d\d", text) and "::" not in text else REPLACEMENT
