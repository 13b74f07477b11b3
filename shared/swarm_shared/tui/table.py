"""Tables: columns as wide as they need; the last flexible one takes the remaining width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm_shared.tui.styled_text import Line, Span, cut, fill, line, width_of


@dataclass(frozen=True, slots=True)
class Column:
    """A column's title and how its width is chosen."""

    title: str
    right: bool = False
    """Align at the right, as for numbers."""
    smallest: int = 3
    largest: int = 40
    flexible: bool = False
    """Shrinks when there is little room."""
    keep: int = 0
    """Columns with a small number shrink first, and are left out first."""


def table(columns: Sequence[Column], rows: Sequence[Sequence[Line]], width: int) -> list[Line]:
    """Draw the heading, then a line for each row, indented by two cells."""
    width -= 2
    widths = _widths(columns, rows, width)
    shown = [index for index, cells in enumerate(widths) if cells]
    head = _row([line((columns[index].title, "dim")) for index in shown], columns, widths, shown)
    body = [_row([row[index] for index in shown], columns, widths, shown) for row in rows]
    return [(Span("  "), *cut(drawn, width)) for drawn in (head, *body)]


def _row(
    cells: Sequence[Line],
    columns: Sequence[Column],
    widths: Sequence[int],
    shown: Sequence[int],
) -> Line:
    drawn: list[Span] = []
    for index, cell in zip(shown, cells, strict=True):
        text = cut(cell, widths[index])
        blank = Span(" " * (widths[index] - width_of(text)))
        drawn += [blank, *text] if columns[index].right else fill(text, widths[index])
        drawn.append(Span("  "))
    return tuple(drawn[:-1])


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[Line]], width: int) -> list[int]:
    """Return the cells of each column; 0 for one that is left out."""
    widths = [
        min(column.largest, max(len(column.title), *(width_of(row[i]) for row in rows), 1))
        if rows
        else max(1, len(column.title))
        for i, column in enumerate(columns)
    ]
    wanted = list(widths)
    dearest_last = sorted(range(len(columns)), key=lambda i: columns[i].keep)
    for index in dearest_last:
        if columns[index].flexible:
            over = max(0, _sum(widths) - width)
            smallest = min(widths[index], columns[index].smallest)
            widths[index] = max(smallest, widths[index] - over)
    for index in dearest_last:
        if _sum(widths) <= width:
            break
        if len([cells for cells in widths if cells]) > 1:
            widths[index] = 0
    # Width that is left is returned to the columns that shrank.
    for index in reversed(dearest_last):
        if columns[index].flexible and widths[index]:
            widths[index] += min(wanted[index] - widths[index], max(0, width - _sum(widths)))
    return widths


def _sum(widths: Sequence[int]) -> int:
    shown = [cells for cells in widths if cells]
    return sum(shown) + 2 * (len(shown) - 1)
