"""The stage that this peer holds: its worker, version, receipts, and what is in flight."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_client.pipeline.receipts import ReceiptBook
from swarm_client.stage.handle.worker_handle import StageWorker
from swarm_shared.base.types import StageIndex, Step, Version

RATE_WEIGHT = 0.2
"""Weight of the newest microbatch in the reported rate."""


@dataclass(slots=True, eq=False)
class Holding:
    stage: StageIndex
    worker: StageWorker
    version: Version
    receipts: ReceiptBook
    is_last: bool
    closing: bool = False
    """Set between Close and its end: nothing new of `step` is accumulated, its table is
    complete."""
    averaged_attempt: int | None = None
    """The attempt of step version + 1 whose averaged gradient is in the result segment."""
    in_flight: int = 0
    seconds_per_microbatch: float | None = None
    computed: int = 0
    """Microbatches computed since the last heartbeat."""
    busy_seconds: float = 0.0
    """Seconds that these took to compute."""
    staleness: int = 0
    """Number of steps after `step` that can be computed as well; the run's setting."""

    @property
    def step(self) -> Step:
        """The step that is applied next: the only one that can close."""
        return Step(self.version + 1)

    def works_on(self, step: Step) -> bool:
        """Whether microbatches of this step can be computed now."""
        return self.step <= step <= self.step + self.staleness

    def evaluates(self, step: Step) -> bool:
        """Whether the newest parameters are those that an evaluation in this step needs."""
        return step == self.step

    def closes(self, step: Step) -> bool:
        """Whether the step's commit set is settled, so that nothing may be added."""
        return self.closing and step == self.step

    def observe(self, compute_seconds: float) -> None:
        """Record the seconds that forward and backward of one microbatch took on this device."""
        self.computed += 1
        self.busy_seconds += compute_seconds
        if self.seconds_per_microbatch is None:
            self.seconds_per_microbatch = compute_seconds
        else:
            self.seconds_per_microbatch += RATE_WEIGHT * (
                compute_seconds - self.seconds_per_microbatch
            )

    def take_work(self) -> tuple[int, float]:
        """Microbatches computed since the previous call, and the seconds they took."""
        work = self.computed, self.busy_seconds
        self.computed, self.busy_seconds = 0, 0.0
        return work

    @property
    def microbatches_per_second(self) -> float:
        seconds = self.seconds_per_microbatch
        return 1.0 / seconds if seconds else 0.0
