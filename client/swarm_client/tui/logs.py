"""The log pane: filtered by words and by level, following the newest line."""

from __future__ import annotations

from collections.abc import Iterable

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.reactive import reactive
from textual.widgets import Input

from swarm_client.tui.model import ClientModel
from swarm_shared.base.text import printable
from swarm_shared.tui.formatting import clock_text
from swarm_shared.tui.source import LogEntry
from swarm_shared.tui.styled_text import Line, Role, line
from swarm_shared.tui.widgets import Block, Pane

LEVELS = ("all", "event", "info", "warning", "error")
"""Levels that `l` cycles through. `event` are the lines that `join` prints; the others are minimum
levels."""
_GRAVITY = {"debug": 0, "info": 1, "event": 1, "warning": 2, "error": 3, "critical": 3}
_ROLES: dict[str, Role] = {"debug": "dim", "warning": "warn", "error": "bad", "critical": "bad"}


def chosen(entries: Iterable[LogEntry], words: str, level: str) -> list[LogEntry]:
    """Return the entries that hold all of the words, in any case, and have the level."""
    wanted = words.casefold().split()
    return [
        entry
        for entry in entries
        if _grave(entry, level) and all(word in entry.text.casefold() for word in wanted)
    ]


def _grave(entry: LogEntry, level: str) -> bool:
    said = entry.level.lower()
    if level == "all":
        return True
    if level == "event":
        return said == "event"
    return _GRAVITY.get(said, 1) >= _GRAVITY[level]


def log_line(entry: LogEntry) -> Line:
    level = entry.level.lower()
    role = _ROLES.get(level, "")
    shown = "" if level == "event" else f"{printable(level)[:8]:<8} "
    return line((f"{clock_text(entry.time)} ", "dim"), (shown, role), (printable(entry.text), role))


class LogLines(Pane):
    """Stays at the newest line; scrolling up stops following, going to the end resumes it."""

    follows = reactive(True)

    def redraw(self, *, faded: bool | None = None) -> None:
        super().redraw(faded=faded)
        if self.follows:
            self.call_after_refresh(self._show_newest)

    def _show_newest(self) -> None:
        if self.follows:  # else it was scrolled meanwhile
            self.scroll_end(animate=False, immediate=True)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self.follows = self.is_vertical_scroll_end


class LogPane(Vertical):
    """An input for filter words, and the entries that match."""

    DEFAULT_CSS = """
    LogPane > Input { height: 1; border: none; padding: 0 1; background: $surface; display: none; }
    LogPane.-filtering > Input { display: block; }
    LogPane > Block { height: 1; background: $surface; }
    LogPane > Pane { height: 1fr; }
    """

    def __init__(self, model: ClientModel, *, id: str) -> None:
        super().__init__(id=id)
        self._model = model
        self.words = ""
        self.level = LEVELS[0]
        self._shown = 0

    def compose(self) -> ComposeResult:
        yield Block(self._draw_head, id="log-head")
        yield Input(placeholder="words that must occur; Enter keeps them, Escape drops them")
        yield LogLines(self._draw, id="log-lines")

    def _draw(self, width: int, height: int) -> list[Line]:
        entries = chosen(self._model.log, self.words, self.level)
        self._shown = len(entries)
        if not entries:
            nothing = "nothing has been logged yet" if not self._model.log else "no line matches"
            return [line((nothing, "dim"))]
        return [log_line(entry) for entry in entries]

    def _draw_head(self, width: int, height: int) -> list[Line]:
        words = f" with {printable(self.words)!r}" if self.words else ""
        follow = "following" if self.query_one(LogLines).follows else "paused (f follows again)"
        return [
            line(
                f" {self._shown:,} of {len(self._model.log):,} lines{words}, level ",
                (self.level, "strong"),
                f", {follow}",
            )
        ]

    def renew(self) -> None:
        """Redraw after a new entry or a change of the filter."""
        self.query_one(LogLines).redraw()
        self.query_one("#log-head", Block).redraw()

    def turn_level(self) -> None:
        self.level = LEVELS[(LEVELS.index(self.level) + 1) % len(LEVELS)]
        self.renew()

    def turn_follow(self) -> None:
        pane = self.query_one(LogLines)
        pane.follows = not pane.follows

    def start_filter(self) -> None:
        self.add_class("-filtering")
        self.query_one(Input).focus()

    def on_mount(self) -> None:
        self.watch(self.query_one(LogLines), "follows", self.renew, init=False)

    def on_input_changed(self, event: Input.Changed) -> None:
        self.words = event.value
        self.renew()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.end_filter(keep=True)

    def end_filter(self, *, keep: bool) -> None:
        field = self.query_one(Input)
        if not keep:
            field.value = ""
            self.words = ""
        self.remove_class("-filtering")
        self.query_one(LogLines).focus()
        self.renew()
