"""Markdown tables of the generated pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_RULES = {"l": "---", "r": "---:"}


def markdown_table(
    columns: Sequence[str], alignment: str, rows: Iterable[Sequence[str]]
) -> list[str]:
    """Return the lines of a table; `alignment` has one `l` or `r` per column."""
    return [
        f"| {' | '.join(columns)} |",
        f"|{'|'.join(_RULES[side] for side in alignment)}|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def headed_table(
    head: str, columns: Sequence[str], alignment: str, rows: Iterable[Sequence[str]], foot: str = ""
) -> str:
    """Return a table with a paragraph before it, and one behind it."""
    lines = [head, "", *markdown_table(columns, alignment, rows)]
    return "\n".join([*lines, *(("", foot) if foot else ())])


def when_and_where(document: Mapping[str, Any]) -> str:
    """Return the date of a result and the machine that it was measured on."""
    machine = document["machine"]
    return f"{document['measured_at'][:10]}, {machine['cpu_count']} cores ({machine['processor']})"
