"""Contribution of this machine, counted in applied steps."""

from __future__ import annotations

import datetime

from swarm_client.control.contribution_log import ContributionLog
from swarm_shared.base.clock import Clock, wall


class ContributionCounter:
    """Counts what all devices of the machine do, on top of the log of earlier starts."""

    def __init__(self, log: ContributionLog, wall_clock: Clock = wall) -> None:
        self.log = log
        self._before = log
        self._wall = wall_clock
        self._last_step: int | None = None

    @property
    def steps(self) -> int:
        """Applied steps since the start."""
        return self.log.steps - self._before.steps

    def add_step(
        self, step: int, microbatches: int, tokens_per_microbatch: int, work_share: float
    ) -> None:
        """Add what one device contributed to an applied step. A step that several devices report is
        counted once."""
        tokens = microbatches * tokens_per_microbatch
        today = datetime.datetime.fromtimestamp(self._wall()).date()
        self.log = self.log.with_step(
            today, microbatches, tokens, tokens * work_share, int(step != self._last_step)
        )
        self._last_step = step

    def __str__(self) -> str:
        return (
            f"contributed {self.log.microbatches - self._before.microbatches} microbatches "
            f"({self.log.tokens - self._before.tokens} tokens) in {self.steps} steps"
        )
