"""The frame of a view: head, row of panes, foot, themes, and the source it follows.

Owns everything that both commands share. The head, the panes and what they draw belong to each
command. The clock is the source's, so that a recording shows its own ages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from textual import work
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.filter import LineFilter, Monochrome, NoColor
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import ContentSwitcher, Footer

from swarm_shared.base.errors import SwarmError
from swarm_shared.base.text import duration_text, printable
from swarm_shared.tui.dialogs import Confirm, Page
from swarm_shared.tui.formatting import clock_text
from swarm_shared.tui.source import (
    D,
    DocumentReceived,
    Event,
    LogReceived,
    Source,
    SourceLost,
)
from swarm_shared.tui.styled_text import Line, Role, Span, ends, line, wrapped
from swarm_shared.tui.terminal_style import Look, ThemeName
from swarm_shared.tui.themes import THEMES, AsciiOnly
from swarm_shared.tui.widgets import Block, Draw, Pane, TabRow

if TYPE_CHECKING:
    from swarm_shared.tui.recording import Recorder

SMALLEST_COLUMNS = 60
SMALLEST_ROWS = 20
REFRESH_SECONDS = 1.0
"""Interval at which ages are redrawn, also while no document arrives."""
OLD_SECONDS = 5.0
"""Age from which a document is shown dim, with its age; a new one comes every second."""


@dataclass(frozen=True, slots=True)
class PaneSpec:
    """A pane's titles, its widget and its help text."""

    title: str
    short: str
    """Title for terminals below 80 columns."""
    widget: Widget
    help: str
    """Description of the pane for the command palette."""
    focus: str = ""
    """ID of the part that takes the keys, where it is not the whole pane."""


def drawn(title: str, short: str, draw: Draw, help: str) -> PaneSpec:
    """Return a pane that scrolls the lines a function draws; its ID is its title in lower case."""
    return PaneSpec(title, short, Pane(draw, id=title.lower()), help)


class ViewApp(App[None], Generic[D]):
    """A view of one kind of document."""

    ENABLE_COMMAND_PALETTE = True
    TITLE = "top"
    CSS = """
    Screen { background: $background; color: $foreground; layers: base; }
    #head { height: 2; background: $background; }
    #panes { height: 1fr; }
    #panes > * { height: 1fr; }
    #small { display: none; width: 1fr; height: 1fr; background: $background; }
    Screen.-small { #head, #tabs, #panes, Footer { display: none; } #small { display: block; } }
    Footer { background: $panel; }
    Toast { max-width: 70; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("question_mark", "help", "Help", key_display="?"),
        # Before the screen's own binding, which would cycle the focus.
        Binding("tab", "turn(1)", "Next pane", show=False, priority=True),
        Binding("shift+tab", "turn(-1)", "Previous pane", show=False, priority=True),
        *(Binding(str(n), f"pane({n - 1})", f"Pane {n}", show=False) for n in range(1, 10)),
    ]
    COMMAND_PALETTE_BINDING = "colon"
    instead: ClassVar[str] = ""
    """The command that prints the same as plain text."""

    def __init__(self, source: Source[D], look: Look, recorder: Recorder | None = None) -> None:
        # Before super(), which asks for the line filters.
        self.look = look
        super().__init__()
        self.source = source
        self.failure: SwarmError | None = None
        """The error that ended the view, for its caller."""
        self._recorder = recorder
        self._recording_trouble_said = False
        self.document: D | None = None
        self.away = ""
        self._heard_at: float | None = None
        self.specs = self.panes()
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = look.theme

    # -------------------------------------------------------------- overridden by the commands

    def panes(self) -> Sequence[PaneSpec]:
        raise NotImplementedError

    def head(self, width: int) -> tuple[Line, Line, str]:
        """Return the two ends of the first line, and the sentence below it."""
        raise NotImplementedError

    def first_line(
        self, word: str, more: str, role: Role, run: str, steps: tuple[int, int] | None
    ) -> tuple[Line, Line]:
        """Return the state with its details and the run's name; the progress and the time."""
        left = line((f"● {word}", role), (more, role), (f"  {run}" if run else "", "strong"))
        far = "step {:,} of {:,}  ".format(*steps) if steps is not None else ""
        return left, line(far, (clock_text(self.source.now()), "dim"))

    def handle_event(self, event: Event[D]) -> None:
        """Update the command's model with an event."""

    def help_text(self) -> str:
        return _HELP

    # -------------------------------------------------------------- screen

    def compose(self) -> ComposeResult:
        yield Block(self._draw_head, id="head")
        yield TabRow([(spec.title, spec.short) for spec in self.specs], id="tabs")
        with ContentSwitcher(initial=self.specs[0].widget.id, id="panes"):
            for spec in self.specs:
                yield spec.widget
        yield Block(self._too_small, id="small")
        yield Footer(show_command_palette=True)

    def on_mount(self) -> None:
        # The source is loaded once the frame is on the screen.
        self.call_after_refresh(self.follow)
        self.set_interval(REFRESH_SECONDS, self.show)
        self.action_pane(0)

    def on_resize(self, event: Resize) -> None:
        small = event.size.width < SMALLEST_COLUMNS or event.size.height < SMALLEST_ROWS
        self.screen_stack[0].set_class(small, "-small")

    def show(self) -> None:
        """Redraw what is visible and has changed; nothing while the view begins or ends."""
        for head in self.query("#head").results(Block):
            head.redraw()
        old = self.is_old
        for pane in self.query(Pane):
            pane.redraw(faded=old)

    @property
    def age_seconds(self) -> float:
        """Age of the document; 0 before the first one."""
        return 0.0 if self._heard_at is None else max(0.0, self.source.now() - self._heard_at)

    @property
    def is_old(self) -> bool:
        return self.document is not None and (bool(self.away) or self.age_seconds > OLD_SECONDS)

    def _draw_head(self, width: int, height: int) -> list[Line]:
        left, right, sentence = self.head(width)
        below = line(printable(sentence))
        if self.away or self.is_old:
            below = line((printable(self.away or "No new status has arrived lately."), "warn"))
            if self.document is not None:
                left = (Span("disconnected, was ", "bad"), *left)
                right = line((f"as it was {duration_text(self.age_seconds)} ago", "warn"))
        return [ends(left, right, width), ends(below, (), width)]

    def _too_small(self, width: int, height: int) -> list[Line]:
        instead = f" `{self.instead}` prints plain text;" if self.instead else ""
        return wrapped(
            f"This view needs {SMALLEST_COLUMNS} columns and {SMALLEST_ROWS} rows, and has {width} "
            f"by {height}: make the window larger;{instead} q ends.",
            width,
        )

    # -------------------------------------------------------------- the source

    @work(exclusive=True, group="follow")
    async def follow(self) -> None:
        try:
            async for event in self.source.events():
                self._take(event)
        except SwarmError as error:
            self.failure = error
            self.exit()

    def _take(self, event: Event[D]) -> None:
        if self._recorder is not None:
            self._recorder.note(event)
            if self._recorder.trouble and not self._recording_trouble_said:
                self._recording_trouble_said = True
                self.say(self._recorder.trouble, bad=True)
        if not self.query("#head"):
            return  # the view is closing, and its parts are removed already
        if isinstance(event, DocumentReceived):
            self.document = event.document
            self._heard_at = event.at
            self.away = event.away
        elif isinstance(event, SourceLost):
            self.away = event.sentence
        self.handle_event(event)
        if not isinstance(event, LogReceived):
            self.show()

    async def sure(self, title: str, text: str, yes: str) -> bool:
        """Whether a person confirms; to be called in a worker."""
        return await self.push_screen_wait(Confirm(title, text, yes)) == 1

    @work(group="act")
    async def ask(self, method: str, arguments: Mapping[str, Any], done: str) -> None:
        """Send a request to the source, and show its outcome."""
        try:
            await self.source.act(method, arguments)
        except SwarmError as error:
            self.say(str(error), bad=True)
        else:
            self.say(done)

    def say(self, text: str, *, bad: bool = False) -> None:
        self.notify(
            printable(text), severity="error" if bad else "information", markup=False, timeout=8
        )

    # -------------------------------------------------------------- keys and commands

    def action_pane(self, index: int) -> None:
        if index >= len(self.specs) or len(self.screen_stack) > 1:
            return
        spec = self.specs[index]
        widget = spec.widget
        self.query_one("#panes", ContentSwitcher).current = widget.id
        self.query_one("#tabs", TabRow).choose(index)
        (self.query_one(f"#{spec.focus}") if spec.focus else widget).focus()
        self.show()

    def action_turn(self, by: int) -> None:
        now = self.query_one("#tabs", TabRow).active
        self.action_pane((now + by) % len(self.specs))

    def on_tab_row_chosen(self, message: TabRow.Chosen) -> None:
        self.action_pane(message.index)

    async def action_help(self) -> None:
        if len(self.screen_stack) == 1:
            self.push_screen(Page("Keys", self.help_text()))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        for index, spec in enumerate(self.specs):
            yield SystemCommand(
                f"Show: {spec.title}", spec.help, lambda index=index: self.action_pane(index)
            )
        for theme in ThemeName:
            yield SystemCommand(
                f"Theme: {theme}", "Change the colours", lambda theme=theme: self.paint(theme)
            )
        yield from self._replay_commands()
        yield SystemCommand("Keys", "What the keys do", self.action_help)
        yield SystemCommand("Quit", "Close this view; nothing else stops", self.action_quit)

    def _replay_commands(self) -> Iterable[SystemCommand]:
        from swarm_shared.tui.recording import Replay

        replay = self.source
        if not isinstance(replay, Replay):
            return
        for steps, name in ((1, "Faster"), (-1, "Slower")):
            yield SystemCommand(
                f"Replay: {name}", f"Now {replay.speed:g} times the pace",
                lambda steps=steps: self.say(f"{replay.faster(steps):g} times the pace"),
            )  # fmt: skip
        yield SystemCommand(
            f"Replay: {'Go on' if replay.held else 'Hold'}", "Stop the recording, or go on",
            lambda: replay.hold(not replay.held),
        )  # fmt: skip

    def paint(self, theme: ThemeName) -> None:
        self.theme = theme

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return textual's own filters, except its handling of NO_COLOR: grey is a colour too."""
        kept = [f for f in super().get_line_filters() if not isinstance(f, Monochrome | NoColor)]
        if self.theme == ThemeName.NONE:
            kept.append(NoColor())
        if not self.look.unicode:
            kept.append(AsciiOnly())
        return kept

    def watch_theme(self, theme: str) -> None:
        self.no_color = theme == ThemeName.NONE


_HELP = """\
1 2 3 …   a pane; Tab and Shift+Tab turn to the next
arrows    scroll; so do PgUp, PgDn, Home, End and the wheel
:         every command by name, and the themes
?         these keys
q         close this view; nothing else stops"""


def run_view(app: ViewApp[Any], recorder: Recorder | None) -> None:
    """Run the view in this terminal until it is closed; raises the error that ended it early."""
    try:
        app.run()
    finally:
        if recorder is not None:
            recorder.close()
    if app.failure is not None:
        raise app.failure
