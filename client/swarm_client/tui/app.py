"""The screen of `swarm-client top`: its panes, and the requests that keys send to the daemon."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from textual import work
from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from swarm_client.control.reasons import DaemonState, SuspendReason
from swarm_client.tui.contribution import contribution, leaderboard
from swarm_client.tui.logs import LogPane
from swarm_client.tui.model import ClientModel
from swarm_client.tui.overview import WORD_ROLES, overview
from swarm_client.tui.pipeline import pipeline
from swarm_client.tui.settings import Setting, SettingsPane, parse_settings, value_text
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.text import printable
from swarm_shared.tui.app import PaneSpec, ViewApp, drawn
from swarm_shared.tui.dialogs import Choose, Fill
from swarm_shared.tui.formatting import clock_text
from swarm_shared.tui.source import DocumentReceived, Event, LogReceived, Source
from swarm_shared.tui.styled_text import EMPTY, Line, line
from swarm_shared.tui.terminal_style import Look

if TYPE_CHECKING:
    from swarm_client.control.status_document import Status
    from swarm_shared.tui.recording import Recorder

    _View = ViewApp[Status]
else:
    _View = ViewApp

PAUSES: tuple[tuple[str, float | None], ...] = (
    ("until I resume it", None),
    ("for 30 minutes", 1800.0),
    ("for 1 hour", 3600.0),
    ("for 2 hours", 7200.0),
    ("for 8 hours", 28_800.0),
    ("for 24 hours", 86_400.0),
)
LOG_PANE, SETTINGS_PANE = 4, 5


class ClientApp(_View):
    """The view of one daemon."""

    instead: ClassVar[str] = "swarm-client status"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause", "Pause"),
        Binding("r", "resume", "Resume"),
        Binding("F", "finish", "Finish"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("l", "level", "Level"),
        Binding("f", "follow", "Follow"),
        Binding("escape", "drop_filter", "Drop", show=False),
    ]

    def __init__(
        self, source: Source[Status], look: Look, recorder: Recorder | None = None
    ) -> None:
        self.model = ClientModel()
        self._pane = 0
        super().__init__(source, look, recorder)

    # -------------------------------------------------------------- what is shown

    def panes(self) -> Sequence[PaneSpec]:
        model = self.model
        return (
            drawn("Overview", "Overview", partial(overview, model),
                  "The run, this machine and what is used of it"),
            drawn("Pipeline", "Pipeline", partial(pipeline, model),
                  "Stages, peers, the flow of microbatches, and moves"),
            drawn("Contribution", "Given", partial(contribution, model),
                  "What this machine has given"),
            drawn("Leaderboard", "Board", partial(leaderboard, model),
                  "People and teams"),
            PaneSpec("Logs", "Logs", LogPane(self.model, id="logs"), "What happened", "log-lines"),
            PaneSpec("Settings", "Limits", SettingsPane(id="settings"),
                     "What this program may use of the machine, and when", "setting-list"),
        )  # fmt: skip

    def head(self, width: int) -> tuple[Line, Line, str]:
        status = self.document
        if status is None:
            return line(("swarm-client", "strong")), EMPTY, "Looking for the daemon."
        word = status.state
        reason = f" ({_reason(status.reason)})" if status.reason is not None else ""
        until = f" until {clock_text(status.until)}" if status.until is not None else ""
        name, steps = "", None
        if status.run is not None:
            name, steps = printable(status.run.name), (status.run.version, status.run.steps)
        first = self.first_line(word.value, f"{reason}{until}", WORD_ROLES[word], name, steps)
        return *first, status.sentence

    def handle_event(self, event: Event[Status]) -> None:
        if isinstance(event, DocumentReceived):
            before = self.model.status
            self.model.see(event.document)
            if before is None or before.state != event.document.state:
                self.refresh_bindings()
        elif isinstance(event, LogReceived):
            self.model.hear(event.entries)
            if self._pane == LOG_PANE:
                self.query_one(LogPane).renew()

    def help_text(self) -> str:
        return f"{_HELP}\n{super().help_text()}"

    def action_pane(self, index: int) -> None:
        super().action_pane(index)
        if len(self.screen_stack) > 1 or index >= len(self.specs):
            return
        self._pane = index
        self.refresh_bindings()
        if index == LOG_PANE:
            self.query_one(LogPane).renew()
        elif index == SETTINGS_PANE:
            self.load_settings()

    @property
    def _is_paused(self) -> bool:
        return self.document is not None and self.document.state is DaemonState.PAUSED

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide keys that have no effect at present."""
        if action in ("filter", "level", "follow", "drop_filter"):
            return self._pane == LOG_PANE
        if action == "resume":
            return self._is_paused
        if action == "pause":
            return not self._is_paused
        return True

    # -------------------------------------------------------------- requests

    @work
    async def action_pause(self) -> None:
        chosen = await self.push_screen_wait(
            Choose(
                "Pause?",
                "Nothing is computed meanwhile. What is in flight is finished first, and the run "
                "goes on with the others.",
                [f"Pause {words}" for words, _ in PAUSES] + ["No, go on computing"],
            )
        )
        if chosen is not None and chosen < len(PAUSES):
            words, seconds = PAUSES[chosen]
            arguments = {} if seconds is None else {"seconds": seconds}
            self.ask("pause", arguments, f"Paused {words}.")

    @work
    async def action_resume(self) -> None:
        if await self.sure("Resume?", "This machine computes again.", "Yes, resume"):
            self.ask("resume", {}, "Resumed.")

    @work
    async def action_finish(self) -> None:
        text = (
            "It completes what it has in flight, hands its stage over, and stops. `swarm-client "
            "join` starts it again."
        )
        if await self.sure("Finish and stop?", text, "Yes, finish and stop"):
            self.ask("finish", {}, "Finishing: what is in flight is completed first.")

    @work(exclusive=True, group="settings")
    async def load_settings(self) -> None:
        pane = self.query_one(SettingsPane)
        try:
            pane.tell(parse_settings(await self.source.act("config_show", {})))
        except SwarmError as error:
            pane.fail(str(error))

    def on_settings_pane_picked(self, message: SettingsPane.Picked) -> None:
        self.change(message.name, message.setting)

    @work(exclusive=True, group="change")
    async def change(self, name: str, setting: Setting) -> None:
        before = value_text(setting.value)

        async def set_it(text: str) -> str | None:
            """What is wrong with it, in the daemon's words; the window stays open then."""
            if text == before:
                return None
            try:
                await self.source.act("config_set", {"name": name, "text": text})
            except SwarmError as error:
                return printable(str(error))
            return None

        meaning = f"{setting.meaning} Empty: the default."
        text = await self.push_screen_wait(
            Fill(printable(name), printable(meaning), before, set_it)
        )
        if text is None or text == before:
            return
        self.say(f"{name} is now {text}" if text.strip() else f"{name} has its default again")
        self.load_settings()

    # -------------------------------------------------------------- the log's keys

    def action_filter(self) -> None:
        self.query_one(LogPane).start_filter()

    def action_level(self) -> None:
        self.query_one(LogPane).turn_level()

    def action_follow(self) -> None:
        self.query_one(LogPane).turn_follow()

    def action_drop_filter(self) -> None:
        self.query_one(LogPane).end_filter(keep=False)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        if self._is_paused:
            yield SystemCommand("Resume", "Compute again", self.action_resume)
        else:
            yield SystemCommand("Pause", "For a time, or until resumed", self.action_pause)
        yield SystemCommand("Finish", "Hand the stage over and stop", self.action_finish)
        yield from super().get_system_commands(screen)


def _reason(reason: SuspendReason) -> str:
    if reason is SuspendReason.PAUSED_BY_USER:
        return "by you"
    return reason.value.replace("_", " ")


_HELP = """\
p         pause, for a time or until resumed
r         resume
F         finish what is in flight, hand the stage over, stop
/ l f     in the log: filter by words, by level; follow"""
