"""The view's state over the documents it received: the number of peers, arrivals and departures."""

from __future__ import annotations

from swarm_coordinator.status.document import RunDocument
from swarm_shared.tui.time_series import TimeSeries

_PACE_STEPS = 20
"""Steps that the remaining time is estimated from; a run's pace changes with its volunteers."""


class RunModel:
    """The newest document and what changed since the view began."""

    def __init__(self) -> None:
        self.document: RunDocument | None = None
        self.attached = TimeSeries()
        self.came = 0
        self.went = 0
        """Departures since the view began; with `came`, the churn."""

    def see(self, document: RunDocument) -> None:
        before = self.document
        self.document = document
        if before is not None and before.time == document.time:
            return
        self.attached.add(document.time, float(len(document.peers)))
        if before is not None:
            old, new = ({peer.peer for peer in one.peers} for one in (before, document))
            self.came += len(new - old)
            self.went += len(old - new)

    def seconds_left(self) -> float | None:
        run = self.document
        if run is None or not run.running or not run.history:
            return None
        pace = [row.seconds for row in run.history[-_PACE_STEPS:]]
        return sum(pace) / len(pace) * max(0, run.steps - run.version) or None
