"""Markdown tables of the generated pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
