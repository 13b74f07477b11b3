"""This home's contribution by day: credit, its recent average, streaks.

Credit is tokens times the stage's share of the model's work, counted in applied steps. The recent
average decays with a half-life of seven days, as BOINC's does, so it is the current credit per day.
Authoritative is the run's ledger; this is what this machine
observed.
"""

from __future__ import annotations

import datetime
from typing import Literal

from pydantic import Field

from swarm_client.control.status_document import ContributionView
from swarm_shared.base.clock import Clock, wall
from swarm_shared.base.frozen_model import FrozenModel

HALF_LIFE_DAYS = 7.0
KEPT_DAYS = 400
"""Days kept: more than a year to plot; older credit remains in the sums."""


class ContributionLog(FrozenModel):
    """The sums, and the credit of each day."""

    format: Literal[1] = 1
    microbatches: int = Field(default=0, ge=0)
    tokens: int = Field(default=0, ge=0)
    steps: int = Field(default=0, ge=0)
    credit: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    days: dict[datetime.date, float] = Field(default_factory=dict)
    """Credit of each day, oldest first."""

    def with_step(
        self, day: datetime.date, microbatches: int, tokens: int, credit: float, steps: int = 1
    ) -> ContributionLog:
        """`steps`: 0 when another device of this machine has reported the same step before."""
        days = dict(self.days)
        if credit > 0:
            days[day] = days.get(day, 0.0) + credit
        kept = dict(sorted(days.items())[-KEPT_DAYS:])
        return ContributionLog(
            microbatches=self.microbatches + microbatches, tokens=self.tokens + tokens,
            steps=self.steps + steps, credit=self.credit + credit, days=kept,
        )  # fmt: skip

    def view(self, today: datetime.date) -> ContributionView:
        return ContributionView(
            microbatches=self.microbatches, tokens=self.tokens, steps=self.steps,
            credit=self.credit, recent_credit=recent_credit(self.days, today),
            days=tuple((day.isoformat(), credit) for day, credit in sorted(self.days.items())),
            streak_days=streak(self.days, today),
        )  # fmt: skip


def recent_credit(days: dict[datetime.date, float], today: datetime.date) -> float:
    """Credit per day: a weighted mean in which a day counts half of one a week later."""
    keep: float = 0.5 ** (1.0 / HALF_LIFE_DAYS)
    total = 0.0
    for day, credit in days.items():
        total += credit * float(keep ** max(0, (today - day).days))
    return total * (1.0 - keep)


def streak(days: dict[datetime.date, float], today: datetime.date) -> int:
    """Consecutive days with credit, up to today or, before today's first, up to yesterday."""
    one_day = datetime.timedelta(days=1)
    day = today if today in days else today - one_day
    count = 0
    while day in days:
        count, day = count + 1, day - one_day
    return count


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
