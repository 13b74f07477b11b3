"""The screen of `swarm-coordinator top`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from swarm_coordinator.status.document import HealthState, RunDocument, current_health
from swarm_coordinator.tui.panes import (
    RunModel,
    admission,
    contributors,
    events,
    overview,
    pipeline,
)
from swarm_shared.base.text import printable
from swarm_shared.tui.app import PaneSpec, ViewApp, drawn
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

    def __init__(
        self, source: Source[RunDocument], look: Look, recorder: Recorder | None = None
    ) -> None:
        self.model = RunModel()
        super().__init__(source, look, recorder)

    def panes(self) -> Sequence[PaneSpec]:
        model = self.model
        return (
            drawn("Overview", "Overview", partial(overview, model),
                  "Health, progress, loss and speed"),
            drawn("Pipeline", "Pipeline", partial(pipeline, model),
                  "Stages, peers with path and rate, moves with their reasons"),
            drawn("Contributors", "Given", partial(contributors, model),
                  "Who gave how much"),
            drawn("Events", "Events", partial(events, model),
                  "What happened, newest first"),
            drawn("Admission", "Bans", partial(admission, model),
                  "Who may join, bans, marks and what was rejected"),
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
