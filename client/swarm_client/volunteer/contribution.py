"""Contribution of this volunteer since its start, counted in applied steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class ContributionCounter:
    """Running sums over all devices of the machine."""

    microbatches: int = 0
    tokens: int = 0
    steps: int = 0
    credit: float = 0.0
    """Tokens times the stage's share of the model's work."""
    on_step: Callable[[int, int, int, float], None] = field(default=lambda *_: None, repr=False)
    """Called with each step's number, microbatches, tokens and credit."""
    _last_step: int | None = None

    def add_step(
        self, step: int, microbatches: int, tokens_per_microbatch: int, work_share: float
    ) -> None:
        """Add what one device contributed to an applied step. A step that several devices report is
        counted once."""
        tokens = microbatches * tokens_per_microbatch
        self.microbatches += microbatches
        self.tokens += tokens
        self.steps += step != self._last_step
        self._last_step = step
        self.credit += tokens * work_share
        self.on_step(step, microbatches, tokens, tokens * work_share)

    def __str__(self) -> str:
        return (
            f"contributed {self.microbatches} microbatches ({self.tokens} tokens) "
            f"in {self.steps} steps"
        )
