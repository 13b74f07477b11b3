"""Text that others chose, made harmless."""

from __future__ import annotations


def printable(text: str) -> str:
    """Names and reasons come from others: nothing of theirs may steer a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
