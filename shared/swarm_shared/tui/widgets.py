"""Widgets that show styled lines: a block of fixed height, a pane that scrolls, the row of tabs.

A pane is redrawn only while it is visible, and only changed lines reach the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from swarm_shared.tui.styled_text import Line, cut, width_of

Draw = Callable[[int, int], Sequence[Line]]
"""Returns lines for a width and a height; more lines than the height scroll."""

ROLE_CLASSES = {
    role: f"ink--{role}" for role in ("strong", "good", "warn", "bad", "dim", "accent", "rule")
}
ROLE_CSS = """
    .ink--strong { text-style: bold; }
    .ink--good { color: $text-success; }
    .ink--warn { color: $text-warning; text-style: bold; }
    .ink--bad { color: $text-error; text-style: bold; }
    .ink--dim { color: $foreground-muted; }
    .ink--accent { color: $text-accent; }
    .ink--rule { color: $foreground-muted; }
    &:nocolor {
        .ink--dim { text-style: dim; }
        .ink--rule { text-style: dim; }
    }
"""


def strip_of(widget: Widget, drawn: Line, width: int, *, faded: bool) -> Strip:
    """Return a line in the widget's colours, exactly as wide as requested."""
    base = widget.rich_style
    dimmed = base + Style(dim=True)
    segments = []
    for text, role in drawn:
        if faded:
            style = dimmed
        elif role:
            # With the background, against which a muted colour is mixed.
            style = base + widget.get_component_rich_style(ROLE_CLASSES[role])
        else:
            style = base
        segments.append(Segment(text, style))
    return Strip(segments, width_of(drawn)).adjust_cell_length(width, base)


class Block(Widget):
    """A few lines that do not scroll."""

    COMPONENT_CLASSES: ClassVar[set[str]] = set(ROLE_CLASSES.values())
    DEFAULT_CSS = f"Block {{ height: 1; {ROLE_CSS} }}"

    def __init__(self, draw: Draw, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._draw = draw
        self._lines: list[Line] = []

    def redraw(self) -> None:
        lines = list(self._draw(self.size.width, self.size.height))
        if lines != self._lines:
            self._lines = lines
            self.refresh()

    def on_resize(self) -> None:
        self.redraw()

    def render_line(self, y: int) -> Strip:
        drawn = self._lines[y] if y < len(self._lines) else ()
        return strip_of(self, drawn, self.size.width, faded=False)


class Pane(ScrollView, can_focus=True):
    """Lines that scroll, with the keys and the wheel."""

    COMPONENT_CLASSES: ClassVar[set[str]] = set(ROLE_CLASSES.values())
    DEFAULT_CSS = f"""
    Pane {{
        background: $background;
        scrollbar-size-horizontal: 0;
        scrollbar-size-vertical: 1;
        {ROLE_CSS}
    }}
    """

    def __init__(self, draw: Draw, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._draw = draw
        self._lines: list[Line] = []
        self.faded = False
        """Shown dim, because the document is old."""

    def redraw(self, *, faded: bool | None = None) -> None:
        """Redraw what has changed; does nothing while the pane is hidden."""
        changed_all = faded is not None and faded != self.faded
        self.faded = self.faded if faded is None else faded
        if not self.is_on_screen:
            return
        width = self._width
        drawn = self._draw(width, self.size.height)
        before, self._lines = self._lines, [cut(one, width) for one in drawn]
        if changed_all or len(before) != len(self._lines):
            self.virtual_size = Size(self._width, len(self._lines))
            self.refresh()
            return
        top = self.scroll_offset.y
        for row in range(top, min(top + self.size.height, len(before))):
            if before[row] != self._lines[row]:
                self.refresh(Region(0, row - top, self.size.width, 1))

    @property
    def _width(self) -> int:
        return self.scrollable_content_region.width

    def scroll_to(self, *args: Any, **options: Any) -> None:
        """Scroll at once: new lines may arrive during an animation, and would end it."""
        super().scroll_to(*args, **options | {"animate": False})

    def on_resize(self) -> None:
        self._lines = []
        self.redraw()

    def on_show(self) -> None:
        self.redraw()

    def render_line(self, y: int) -> Strip:
        row = self.scroll_offset.y + y
        drawn = self._lines[row] if row < len(self._lines) else ()
        return strip_of(self, drawn, self._width, faded=self.faded)


class TabRow(Widget):
    """The panes' names with their keys; the active one is highlighted. Clicks select a pane as
    well."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"tab--active", "tab--key"}
    DEFAULT_CSS = """
    TabRow {
        height: 1;
        background: $panel;
        .tab--active { background: $primary; color: $background; text-style: bold; }
        .tab--key { color: $text-accent; }
        &:ansi { .tab--active { text-style: bold reverse; background: ansi_default; } }
        &:nocolor { .tab--active { text-style: bold reverse; background: ansi_default; } }
    }
    """

    class Chosen(Message):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    def __init__(self, titles: Sequence[tuple[str, str]], *, id: str) -> None:
        """`titles`: each pane's name, and a shorter one for when there is little room."""
        super().__init__(id=id)
        self._titles = titles
        self.active = 0

    def choose(self, index: int) -> None:
        self.active = index
        self.refresh()

    def _labels(self, width: int) -> list[str]:
        for place in (0, 1):
            labels = [f" {n} {names[place]} " for n, names in enumerate(self._titles, 1)]
            if sum(len(label) for label in labels) <= width:
                return labels
        return [f" {n} " for n in range(1, len(self._titles) + 1)]

    def render_line(self, y: int) -> Strip:
        base = self.rich_style
        active = self.get_component_rich_style("tab--active")
        segments = [
            Segment(label, active if index == self.active else base)
            for index, label in enumerate(self._labels(self.size.width))
        ]
        length = sum(segment.cell_length for segment in segments)
        return Strip(segments, length).adjust_cell_length(self.size.width, base)

    def on_click(self, event: events.Click) -> None:
        left = 0
        for index, label in enumerate(self._labels(self.size.width)):
            left += len(label)
            if event.x < left:
                self.post_message(self.Chosen(index))
                return
