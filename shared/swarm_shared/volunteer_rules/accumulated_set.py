"""The set of microbatches in one step's accumulator, and what is kept to take one out again.

Invariants:

1. A microbatch is in the set at most once: `wants` is False for one that is in it.
2. The set is exactly what the gradient sum beside it contains: its owner calls `add`, `remove` and
   `clear` in the same call that adds to the sum, subtracts from it or zeroes it.
3. A removal takes out all microbatches that it names, or is None and takes out none.

The gradients themselves are with the owner of the set (the stage worker's accumulator); so this
rule is the same in a simulation without gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from swarm_shared.base.types import MicrobatchIndex


class Kept(Protocol):
    """The inputs from which a microbatch's gradient can be computed again."""

    @property
    def nbytes(self) -> int: ...


KeptT = TypeVar("KeptT", bound=Kept)


@dataclass(frozen=True, slots=True)
class Removal(Generic[KeptT]):
    """Microbatches to take out. `recompute` has the inputs of each, in the same order, and is empty
    where zeroing the sum does it."""

    microbatches: tuple[MicrobatchIndex, ...]
    recompute: tuple[KeptT, ...]


class AccumulatedSet(Generic[KeptT]):
    """The microbatches of one step's sum. Inputs are kept within a budget in bytes."""

    def __init__(self, kept_budget_bytes: int) -> None:
        self._budget_bytes = kept_budget_bytes
        self._kept_bytes = 0
        self._kept: dict[MicrobatchIndex, KeptT | None] = {}

    def __contains__(self, microbatch: MicrobatchIndex) -> bool:
        return microbatch in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def microbatches(self) -> tuple[MicrobatchIndex, ...]:
        """The microbatches in the sum, in ascending order."""
        return tuple(sorted(self._kept))

    def kept(self, microbatch: MicrobatchIndex) -> KeptT | None:
        """The inputs of a microbatch in the sum; None if it is not in it, or if they were
        dropped."""
        return self._kept.get(microbatch)

    def wants(self, microbatch: MicrobatchIndex, accumulate: bool) -> bool:
        """Whether a computation that asks to `accumulate` shall add its gradient."""
        return accumulate and microbatch not in self._kept

    def add(self, microbatch: MicrobatchIndex, kept: KeptT) -> None:
        """Record an added microbatch; drop the inputs of the oldest ones beyond the budget."""
        if microbatch in self._kept:
            raise ValueError(f"microbatch {microbatch} is in the accumulator already")
        self._kept[microbatch] = kept
        self._kept_bytes += kept.nbytes
        # Racing and hedged microbatches come last, and those are the ones to take out again.
        for oldest, inputs in self._kept.items():
            if self._kept_bytes <= self._budget_bytes:
                break
            if inputs is not None:
                self._kept[oldest] = None
                self._kept_bytes -= inputs.nbytes

    def removal(self, microbatches: Iterable[MicrobatchIndex]) -> Removal[KeptT] | None:
        """The removal of these microbatches; None if one of them cannot be computed again.
        Microbatches that are not in the set are skipped."""
        wanted = tuple(sorted(self._kept.keys() & set(microbatches)))
        if len(wanted) == len(self._kept):
            return Removal(wanted, ())
        inputs = tuple(kept for index in wanted if (kept := self._kept[index]) is not None)
        return Removal(wanted, inputs) if len(inputs) == len(wanted) else None

    def remove(self, microbatches: Iterable[MicrobatchIndex]) -> None:
        """Record that these microbatches have been taken out of the sum."""
        for microbatch in microbatches:
            kept = self._kept.pop(microbatch)
            self._kept_bytes -= 0 if kept is None else kept.nbytes

    def clear(self) -> None:
        """Record that the sum is zero."""
        self._kept.clear()
        self._kept_bytes = 0
