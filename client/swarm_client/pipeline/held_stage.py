"""The stage that this peer holds: its worker, its account, where its output goes, and its load."""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from swarm_client.pipeline.downstream import Downstream
from swarm_client.stage.handle.worker_handle import StageWorker
from swarm_shared.base.types import StageIndex, Step, Version
from swarm_shared.volunteer_rules.stage_account import StageAccount
from swarm_shared.volunteer_rules.step_close import StepClose

MAX_MEMORY_FAILURES = 3
"""Microbatches in a row that may fail for lack of memory before the stage is handed over."""

RATE_WEIGHT = 0.2
"""Weight of the newest microbatch in the reported rate."""


@dataclass(slots=True, eq=False)
class ComputeMeter:
    """The time that the device takes for microbatches of one stage, and how many it has
    computed."""

    seconds_per_microbatch: float | None = None
    computed: int = 0
    """Microbatches computed since the last heartbeat."""
    busy_seconds: float = 0.0
    """Seconds that these took to compute."""
    weights_seconds: float = 0.0
    """Seconds of the newest microbatch whose weights' gradients were computed after its answer."""

    def observe(self, compute_seconds: float, weights_seconds: float = 0.0) -> None:
        """Record the seconds that one microbatch took on this device, before and after its
        answer."""
        self.computed += 1
        self.weights_seconds = weights_seconds
        compute_seconds += weights_seconds
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
        """The rate at which the device computes microbatches; 0 before the first."""
        seconds = self.seconds_per_microbatch
        return 1.0 / seconds if seconds else 0.0


@dataclass(slots=True, eq=False)
class MemoryFailures:
    """Microbatches in a row for which the device had too little memory, although the worker kept
    as little of each as it can."""

    in_a_row: int = 0
    too_many: trio.Event = field(default_factory=trio.Event)
    """Set at MAX_MEMORY_FAILURES."""

    def failed(self) -> None:
        """Count a microbatch that failed for lack of memory."""
        self.in_a_row += 1
        if self.in_a_row >= MAX_MEMORY_FAILURES:
            self.too_many.set()

    def computed(self) -> None:
        """Begin to count anew: a microbatch was computed."""
        self.in_a_row = 0


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """A stage at the assigned version, held or prepared beside the held one."""

    worker: StageWorker
    account: StageAccount[str]
    """Receipts are signed envelopes in base64."""


@dataclass(slots=True, eq=False)
class Holding:
    """The stage that is served, from its installation to the end of its assignment."""

    worker: StageWorker
    account: StageAccount[str]
    next_stage: Downstream | None
    """The sender to the next stage; None on the last one."""
    close: StepClose[str] = field(init=False)
    in_flight: int = 0
    """Microbatches being served."""
    owed: int = 0
    """Microbatches that are answered, and whose weights' gradients are still to be computed."""
    meter: ComputeMeter = field(default_factory=ComputeMeter)
    memory: MemoryFailures = field(default_factory=MemoryFailures)

    def __post_init__(self) -> None:
        self.close = StepClose(self.account)

    @property
    def stage(self) -> StageIndex:
        return self.account.stage

    @property
    def version(self) -> Version:
        """The version of the parameters that the worker holds."""
        return self.account.version

    @property
    def step(self) -> Step:
        """The step that is applied next: the only one that can close."""
        return self.account.step
