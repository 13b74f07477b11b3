"""Text with roles instead of colours: lines of spans.

Owns measuring, cutting and arranging lines. Widths are cells of a terminal, in which a character of
some scripts takes two. Lines are drawn in Unicode; `themes.AsciiOnly` converts them for terminals
without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from rich.cells import cell_len, set_cell_size

Role = Literal["", "strong", "good", "warn", "bad", "dim", "accent", "rule"]


class Span(NamedTuple):
    text: str
    role: Role = ""


Line = tuple[Span, ...]
EMPTY: Line = ()


def line(*parts: str | Span | tuple[str, Role]) -> Line:
    return tuple(Span(part) if isinstance(part, str) else Span(*part) for part in parts if part)


def plain(drawn: Line) -> str:
    return "".join(piece.text for piece in drawn)


def width_of(drawn: Line) -> int:
    return sum(cell_len(piece.text) for piece in drawn)


def cut(drawn: Line, width: int) -> Line:
    """Cut to at most `width` cells; a cut line ends in an ellipsis."""
    if width_of(drawn) <= width:
        return drawn
    left = max(0, width - 1)
    kept: list[Span] = []
    for piece in drawn:
        cells = cell_len(piece.text)
        if cells > left:
            kept.append(Span(set_cell_size(piece.text, left), piece.role))
            break
        kept.append(piece)
        left -= cells
    return (*kept, Span("…", kept[-1].role if kept else "")) if width > 0 else EMPTY


def fill(drawn: Line, width: int) -> Line:
    """Cut or pad to exactly `width` cells."""
    shown = cut(drawn, width)
    return (*shown, Span(" " * (width - width_of(shown))))


def beside(left: Sequence[Line], right: Sequence[Line], width: int) -> list[Line]:
    """Set two blocks side by side, each with half of the width and two cells between them."""
    half = (width - 2) // 2
    rows = max(len(left), len(right))
    return [
        (
            *fill(left[row] if row < len(left) else EMPTY, half),
            Span("  "),
            *cut(right[row] if row < len(right) else EMPTY, width - half - 2),
        )
        for row in range(rows)
    ]


def ends(left: Line, right: Line, width: int) -> Line:
    """Set one text at each end of a line; the right one stays whole while there is room for it."""
    room = width - width_of(right)
    if room < 2:
        return cut(right, width)
    return (*fill(left, room - 1), Span(" "), *right)


def heading(title: str, width: int) -> Line:
    rule = "─" * max(0, width - cell_len(title) - 1)
    return line((title, "strong"), " ", (rule, "rule"))


def wrapped(text: str, width: int, role: Role = "", indent: str = "") -> list[Line]:
    """Wrap words over as many lines as they need; a word that is longer than a line is split."""
    lines: list[str] = []
    current = ""
    room = max(1, width - len(indent))
    for word in text.split():
        while cell_len(word) > room:
            if current:
                lines.append(current)
                current = ""
            lines.append(word[:room])
            word = word[room:]
        joined = f"{current} {word}" if current else word
        if cell_len(joined) > room:
            lines.append(current)
            joined = word
        current = joined
    if current:
        lines.append(current)
    return [line(indent, (one, role)) for one in lines]


def joined(parts: Iterable[Line], separator: str) -> Line:
    """Join the parts that are not empty, with the separator between them."""
    drawn: list[Span] = []
    for part in parts:
        if not part:
            continue
        if drawn:
            drawn.append(Span(separator, "dim"))
        drawn.extend(part)
    return tuple(drawn)
