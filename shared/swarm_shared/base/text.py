"""Text from remotes, made safe to print."""

from __future__ import annotations


def printable(text: str, replacement: str = "\N{REPLACEMENT CHARACTER}") -> str:
    """Replace every control character, so that text from a remote cannot steer a terminal."""
    return "".join(c if c.isprintable() else replacement for c in text)
