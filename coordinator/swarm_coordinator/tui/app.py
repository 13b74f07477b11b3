"""The screen of `swarm-coordinator top`: its panes, and the bans that its keys ask for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from textual import work
from textual.binding import Binding, BindingType
from textual.widgets import ContentSwitcher

from swarm_coordinator.admission.book import MAX_TEXT_CHARACTERS
from swarm_coordinator.status.document import HealthState, RunDocument, current_health
from swarm_coordinator.tui.panes import RunModel, admission, events, overview, pipeline
from swarm_coordinator.tui.table_pane import TablePane
from swarm_coordinator.tui.tables import BANS, CONTRIBUTORS, PEERS
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.text import printable
from swarm_shared.tui.app import PaneSpec, ViewApp, drawn
from swarm_shared.tui.dialogs import Fill, Page
from swarm_shared.tui.source import DocumentReceived, Event, Source
from swarm_shared.tui.styled_text import EMPTY, Line, Role, line
from swarm_shared.tui.terminal_style import Look

if TYPE_CHECKING:
    from swarm_shared.tui.recording import Recorder

_ROLES: dict[HealthState, Role] = {
    HealthState.HEALTHY: "good",
    HealthState.FINISHED: "good",
    HealthState.WAITING: "warn",
    HealthState.DEGRADED: "bad",
    HealthState.STOPPED: "warn",
}


class RunApp(ViewApp[RunDocument]):
    """The view of one run."""

    instead: ClassVar[str] = "swarm-coordinator status"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("b", "ban", "Ban"),
        Binding("u", "unban", "Unban"),
    ]

    def __init__(
        self, source: Source[RunDocument], look: Look, recorder: Recorder | None = None
    ) -> None:
        self.model = RunModel()
        super().__init__(source, look, recorder)

    def panes(self) -> Sequence[PaneSpec]:
        model = self.model
        return (
            drawn("Overview", "Run", partial(overview, model),
                  "Health, progress, loss and speed"),
            drawn("Pipeline", "Pipe", partial(pipeline, model),
                  "Stages, and moves with their reasons"),
            PaneSpec("Peers", "Peers", TablePane(PEERS, id="peers"),
                     "Attached peers with path and rate"),
            PaneSpec("Contributors", "Given", TablePane(CONTRIBUTORS, id="contributors"),
                     "Who gave how much"),
            drawn("Events", "Events", partial(events, model),
                  "What happened, newest first"),
            drawn("Admission", "Admit", partial(admission, model),
                  "Who may join, marks and what was rejected"),
            PaneSpec("Bans", "Bans", TablePane(BANS, id="bans"), "Banned peers"),
        )  # fmt: skip

    def head(self, width: int) -> tuple[Line, Line, str]:
        run = self.document
        if run is None:
            return line(("swarm-coordinator", "strong")), EMPTY, "Reading the run's folder."
        # The view itself shows how old the document is.
        health = current_health(run, run.time)
        steps = (run.version, run.steps)
        first = self.first_line(health.state, "", _ROLES[health.state], printable(run.run), steps)
        return *first, printable(health.sentence)

    @property
    def is_old(self) -> bool:
        """Whether the document is outdated; that of a finished run is not."""
        finished = self.document is not None and self.document.finished
        return super().is_old and not (finished and not self.away)

    def handle_event(self, event: Event[RunDocument]) -> None:
        if isinstance(event, DocumentReceived):
            self.model.see(event.document)

    def help_text(self) -> str:
        return f"{_HELP}\n{super().help_text()}"

    # -------------------------------------------------------------- tables

    @property
    def shown_table(self) -> TablePane | None:
        """The table in the open pane; None in a drawn pane, and while the view begins or ends."""
        for panes in self.query("#panes").results(ContentSwitcher):
            # Not `visible_content`, which expects the pane also where it is removed already.
            for table in panes.query(TablePane):
                if table.id == panes.current:
                    return table
        return None

    def show(self) -> None:
        super().show()
        table = self.shown_table
        if table is not None and self.document is not None:
            table.renew(self.document, faded=self.is_old)

    def action_pane(self, index: int) -> None:
        super().action_pane(index)
        self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide keys that have no effect in the open pane."""
        table = self.shown_table
        if action == "ban":
            return table is not None and table.id != "bans"
        if action == "unban":
            return table is not None and table.id == "bans"
        return True

    def on_data_table_row_selected(self, message: TablePane.RowSelected) -> None:
        table = self.shown_table
        if table is not None and table.chosen is not None:
            self.push_screen(Page(table.chosen.name, table.details(table.chosen)))

    # -------------------------------------------------------------- bans

    @work(exclusive=True, group="ban")
    async def action_ban(self) -> None:
        table = self.shown_table
        row = None if table is None else table.chosen
        if row is None:
            return

        async def check(text: str) -> str | None:
            if len(text) > MAX_TEXT_CHARACTERS:
                return f"A reason has at most {MAX_TEXT_CHARACTERS} characters."
            return None

        reason = await self.push_screen_wait(
            Fill(
                f"Ban {row.name}", "The reason, which the peer is sent; it may be empty.", "", check
            )
        )
        if reason is None:
            return
        text = (
            f"{row.peer} is excluded from the run at once, in every admission mode, until it is "
            "unbanned."
        )
        if await self.sure(f"Ban {row.name}?", text, "Yes, ban it"):
            await self._change("ban", {"peer": row.peer, "reason": printable(reason)})

    @work(exclusive=True, group="ban")
    async def action_unban(self) -> None:
        table = self.shown_table
        row = None if table is None else table.chosen
        if row is None:
            return
        text = f"The admission mode decides whether {row.peer} may join again."
        if await self.sure(f"Lift the ban of {row.name}?", text, "Yes, unban it"):
            await self._change("unban", {"peer": row.peer})

    async def _change(self, method: str, arguments: dict[str, Any]) -> None:
        try:
            answer = await self.source.act(method, arguments)
        except SwarmError as error:
            self.say(str(error), bad=True)
            return
        self.say(str(answer["text"]))
        if answer.get("warning"):
            self.say(f"note: {answer['warning']}")


_HELP = """\
b u       in a table: ban the peer of the row, lift its ban
s S       in a table: sort by the next column, turn the order round; so do clicks on its head
enter     the whole row"""
