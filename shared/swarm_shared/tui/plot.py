"""A curve in text: braille dots, two by four a cell, with an axis labelled at its ends.

Our own drawing instead of a plotting library: those for terminals need numpy, which alone takes
longer to import than a view may take to start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from swarm_shared.tui.bars import place
from swarm_shared.tui.styled_text import Line, Span, cut, line

Point = tuple[float, float]

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Braille's bits by row and column of a cell."""
_BRAILLE = 0x2800


def plot(
    points: Sequence[Point],
    width: int,
    height: int,
    *,
    label: Callable[[float], str],
    from_zero: bool = False,
) -> list[Line]:
    """Draw `height` lines: the curve, and below it where the x axis begins and ends."""
    known = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    rows = height - 1
    if not known or rows < 1:
        empty = line(("nothing to draw yet", "dim"))
        return [empty, *[()] * (height - 1)] if height else []
    ys = [y for _, y in known]
    low, high = (min(0.0, *ys) if from_zero else min(ys)), max(ys)
    labels = (label(high), label(low))
    margin = max(len(text) for text in labels)
    columns = max(1, width - margin - 2)
    span = ((known[0][0], known[-1][0]), (low, high))
    cells = _braille(known, columns, rows, span)
    drawn = []
    for row, text in enumerate(cells):
        shown = labels[0] if row == 0 else labels[1] if row == rows - 1 else ""
        drawn.append(line((f"{shown:>{margin}} ", "dim"), ("│", "rule"), (text, "accent")))
    first, last = f"{known[0][0]:,.0f}", f"{known[-1][0]:,.0f}"
    gap = columns - len(first) - len(last)
    below = f"{first}{' ' * gap}{last}" if gap > 0 else last[:columns]
    drawn.append(cut((Span(" " * (margin + 2)), Span(below, "dim")), width))
    return drawn


def columns_plot(values: Sequence[float], width: int, height: int) -> list[str]:
    """Draw upright columns from zero, one for each of the newest values, as wide as there is room
    for."""
    wide = 2 if len(values) * 2 <= width else 1
    shown = list(values)[-(width // wide) :]
    top = max(shown, default=0.0)
    if top <= 0 or height < 1:
        return [" " * width for _ in range(height)]
    levels = " ▁▂▃▄▅▆▇█"
    steps = len(levels) - 1
    filled = [max(1, round(value / top * height * steps)) if value > 0 else 0 for value in shown]
    return [
        "".join(
            levels[min(steps, max(0, amount - row * steps))] + (" " if wide == 2 else "")
            for amount in filled
        )
        for row in reversed(range(height))
    ]


_Span = tuple[tuple[float, float], tuple[float, float]]


def _braille(points: Sequence[Point], columns: int, rows: int, span: _Span) -> list[str]:
    cells = [[0] * columns for _ in range(rows)]
    for x, y in _dots(points, columns * 2, rows * 4, span):
        cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    return ["".join(chr(_BRAILLE + bits) if bits else " " for bits in row) for row in cells]


def _dots(points: Sequence[Point], columns: int, rows: int, span: _Span) -> list[tuple[int, int]]:
    """Return one dot a column, at the mean of its values; neighbours are joined by a line."""
    (left, right), (low, high) = span
    sums: dict[int, tuple[float, int]] = {}
    for x, y in points:
        column = place(x, left, right, columns)
        mean, count = sums.get(column, (0.0, 0))
        sums[column] = (mean + (y / (count + 1) - mean / (count + 1)), count + 1)
    heights = {
        column: rows - 1 - place(mean, low, high, rows) for column, (mean, _) in sums.items()
    }
    dots: list[tuple[int, int]] = []
    before: tuple[int, int] | None = None
    for column in sorted(heights):
        here = (column, heights[column])
        if before is not None:
            dots += _between(before, here)
        dots.append(here)
        before = here
    return dots


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    length = max(end[0] - start[0], abs(end[1] - start[1]))
    return [
        (
            start[0] + round((end[0] - start[0]) * step / length),
            start[1] + round((end[1] - start[1]) * step / length),
        )
        for step in range(1, length)
    ]
