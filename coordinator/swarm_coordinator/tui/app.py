"""The screen of `swarm-coordinator top`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from swarm_coordinator.tui.document import RunDocument, health
from swarm_coordinator.tui.model import RunModel
from swarm_coordinator.tui.panes import admission, contributors, events, overview, pipeline
from swarm_shared.tui.app import PaneSpec, ViewApp
from swarm_shared.tui.ink import EMPTY, Line, Role, line
from swarm_shared.tui.look import Look
from swarm_shared.tui.source import Event, Seen, Source
from swarm_shared.tui.widgets import Pane
from swarm_shared.tui.words import clock_text, printable

_ROLES: dict[str, Role] = {
    "healthy": "good",
    "finished": "good",
    "waiting": "warn",
    "incomplete": "bad",
    "stopped": "warn",
}


class RunView(ViewApp[RunDocument]):
    instead: ClassVar[str] = "swarm-coordinator status"

    def __init__(self, source: Source[RunDocument], look: Look) -> None:
        self.model = RunModel(look)
        super().__init__(source, look)

    def panes(self) -> Sequence[PaneSpec]:
        def pane(name: str, draw: Any) -> Pane:
            return Pane(partial(draw, self.model), self.look, id=name)

        return (
            PaneSpec("Overview", "Overview", pane("overview", overview),
                     "Health, progress, loss and speed"),
            PaneSpec("Pipeline", "Pipeline", pane("pipeline", pipeline),
                     "Stages, peers with path and rate, moves with their reasons"),
            PaneSpec("Contributors", "Given", pane("contributors", contributors),
                     "Who gave how much"),
            PaneSpec("Events", "Events", pane("events", events), "What happened, newest first"),
            PaneSpec("Admission", "Bans", pane("admission", admission),
                     "Who may join, bans and marks"),
        )  # fmt: skip

    def head(self, width: int) -> tuple[Line, Line, str]:
        run = self.document
        if run is None:
            return line(("swarm-coordinator", "strong")), EMPTY, "Reading the run's folder."
        word, sentence = health(run)
        mark = "● " if self.look.unicode else "* "
        left = line((f"{mark}{word}", _ROLES[word]), (f"  {printable(run.run)}", "strong"))
        step = f"step {run.version:,} of {run.steps:,}  "
        return left, line(step, (clock_text(self.source.now()), "dim")), sentence

    @property
    def is_old(self) -> bool:
        """A finished run stays as it is."""
        finished = self.document is not None and self.document.finished
        return super().is_old and not (finished and not self.away)

    def heard(self, event: Event[RunDocument]) -> None:
        if isinstance(event, Seen):
            self.model.see(event.document)
