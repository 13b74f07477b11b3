"""What this volunteer has given since it started, as counted in applied steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Contribution:
    microbatches: int = 0
    tokens: int = 0
    steps: int = 0

    def add_step(self, microbatches: int, tokens_per_microbatch: int) -> None:
        self.microbatches += microbatches
        self.tokens += microbatches * tokens_per_microbatch
        self.steps += 1

    def __str__(self) -> str:
        return (
            f"contributed {self.microbatches} microbatches ({self.tokens} tokens) "
            f"in {self.steps} steps"
        )
