"""The view's state: the newest document, and the recent course of values.

No textual here: panes are functions of this.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from swarm_shared.tui.source import LogEntry
from swarm_shared.tui.time_series import TimeSeries

if TYPE_CHECKING:
    from swarm_client.control.status_document import DeviceView, Status

MAX_LOG_ENTRIES = 5000


class ClientModel:
    """The newest status, time series and the log."""

    def __init__(self) -> None:
        self.status: Status | None = None
        self.loss = TimeSeries(2000)
        """Loss by step, not by time."""
        self.versions = TimeSeries()
        """Version of the run by time."""
        self.tokens_per_second = TimeSeries()
        self.sent = TimeSeries()
        self.received = TimeSeries()
        self.own_rate = TimeSeries()
        self.queued = TimeSeries()
        self.log: deque[LogEntry] = deque(maxlen=MAX_LOG_ENTRIES)

    def see(self, status: Status) -> None:
        if self.status is not None and _run_id(self.status) != _run_id(status):
            self._forget_run()
        self.status = status
        at = status.time
        self.sent.add(at, status.traffic.sent_bytes_per_second)
        self.received.add(at, status.traffic.received_bytes_per_second)
        self.own_rate.add(at, sum(d.microbatches_per_second for d in status.devices))
        self.queued.add(at, float(sum(d.queued for d in status.devices)))
        if status.run is not None:
            self.tokens_per_second.add(at, status.run.tokens_per_second)
            # A run that was rolled back counts its steps again.
            if self.loss.points() and status.run.version < self.loss.points()[-1][0]:
                self.loss.clear()
                self.versions.clear()
            self.versions.add(at, float(status.run.version))
            if status.run.loss is not None:
                self.loss.add(float(status.run.version), status.run.loss)

    def _forget_run(self) -> None:
        self.loss.clear()
        self.versions.clear()
        self.tokens_per_second.clear()

    def hear(self, entries: tuple[LogEntry, ...]) -> None:
        newest = self.log[-1].number if self.log else -1
        if entries and self.log and entries[0].number <= newest:
            # The daemon was restarted, and numbers its log from the beginning.
            restarted = entries[-1].number < newest
            entries = entries if restarted else tuple(e for e in entries if e.number > newest)
        self.log.extend(entries)


def _run_id(status: Status) -> str | None:
    return None if status.run is None else status.run.id


def share_of_stage(status: Status, device: DeviceView) -> float | None:
    """Return this device's share of the microbatches that its stage computes now."""
    stage = next((row for row in status.stages if row.stage == device.stage), None)
    if stage is None or stage.microbatches_per_second <= 0:
        return None
    return min(1.0, device.microbatches_per_second / stage.microbatches_per_second)


def share_of_run(status: Status) -> float | None:
    """Return the share of the whole pipeline's work now, all stages counted alike."""
    if not status.stages or not any(s.microbatches_per_second > 0 for s in status.stages):
        return None
    shares = [share_of_stage(status, device) or 0.0 for device in status.devices]
    return min(1.0, sum(shares) / len(status.stages))


def seconds_left(model: ClientModel) -> float | None:
    """Return the time until the run's last step, at the observed pace; None without any."""
    status = model.status
    points = model.versions.points()
    if status is None or status.run is None or len(points) < 2:
        return None
    (start, first), (end, last) = points[0], points[-1]
    if last <= first:
        return None
    return (end - start) / (last - first) * max(0, status.run.steps - status.run.version)
