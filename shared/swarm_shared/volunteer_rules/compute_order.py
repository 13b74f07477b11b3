"""The order in which one device computes what waits for it.

A device computes one thing at a time. An answer that another peer waits for comes first, so that
memory is free soonest (1F1B, Narayanan et al. 2019, PipeDream): gradients of inputs, then forwards.
The gradients of weights, for which only the step's end waits, fill the time that is left (ZB-H1,
Qi et al. 2024, arXiv 2401.10241, section 2.1). They go before a forward when many of them wait,
when what is kept for them takes the memory that the forward needs, and before a forward of a later
step, whose start they do not delay but whose predecessor's end they do. Within a part an older step
goes first, and of one step the lower microbatch, which is planned to be done first
(`swarm_shared.scheduling.step_plan`). An audit goes when nothing else waits, or after some others:
the close of its step waits for it.

Pure; whether memory is short is an argument.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarm_shared.base.types import MicrobatchIndex, Step

T = TypeVar("T")

MOST_WEIGHTS_WAITING = 8
"""Microbatches whose gradients of weights may wait while forwards are computed. Each holds about
the memory of a graph, and more of them fill no more idle time: in the fine simulator 6, 8 and any
number are equally fast, 4 cost 1 % (docs/decisions, number 0045)."""

COMPUTATIONS_BEFORE_AUDIT = 4
"""Computations that go before an audit that waits."""


class Part(enum.Enum):
    """A kind of computation."""

    INPUT_GRADIENT = enum.auto()
    """A backward pass, with or without the gradients of the weights."""
    FORWARD = enum.auto()
    WEIGHT_GRADIENTS = enum.auto()
    AUDIT = enum.auto()


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[T]):
    step: Step
    microbatch: MicrobatchIndex
    item: T


class ComputeOrder(Generic[T]):
    """Computations that wait for one device."""

    def __init__(self) -> None:
        self._waiting: dict[Part, list[_Waiting[T]]] = {part: [] for part in Part}
        self._before_audit = COMPUTATIONS_BEFORE_AUDIT

    def __bool__(self) -> bool:
        return any(self._waiting.values())

    def add(self, part: Part, step: Step, microbatch: MicrobatchIndex, item: T) -> None:
        """Enter a computation; `item` is returned when its turn has come."""
        self._waiting[part].append(_Waiting(step, microbatch, item))

    def discard(self, matches: Callable[[T], bool]) -> bool:
        """Drop the first computation that matches; False if none does."""
        for queue in self._waiting.values():
            for waiting in queue:
                if matches(waiting.item):
                    queue.remove(waiting)
                    return True
        return False

    def next_forward(self) -> T | None:
        """Return the forward whose turn is before that of all others that wait."""
        forward = self._first(Part.FORWARD)
        return None if forward is None else forward.item

    def take(self, *, memory_short: bool) -> T:
        """Take out the computation whose turn it is. `memory_short`: whether what is kept for the
        gradients of weights leaves too little for a forward. IndexError if none waits."""
        part = self._turn(memory_short)
        chosen = self._first(part)
        if chosen is None:
            raise IndexError("no computation waits")
        self._waiting[part].remove(chosen)
        if part is Part.AUDIT:
            self._before_audit = COMPUTATIONS_BEFORE_AUDIT
        elif self._waiting[Part.AUDIT]:
            self._before_audit -= 1
        return chosen.item

    def _turn(self, memory_short: bool) -> Part:
        forward, weights = self._first(Part.FORWARD), self._first(Part.WEIGHT_GRADIENTS)
        backward = self._waiting[Part.INPUT_GRADIENT]
        others = backward or forward or weights
        if self._waiting[Part.AUDIT] and not (others and self._before_audit):
            return Part.AUDIT
        if backward:
            return Part.INPUT_GRADIENT
        if weights is None:
            return Part.FORWARD
        many = len(self._waiting[Part.WEIGHT_GRADIENTS]) >= MOST_WEIGHTS_WAITING
        if forward is None or many or memory_short or weights.step < forward.step:
            return Part.WEIGHT_GRADIENTS
        return Part.FORWARD

    def _first(self, part: Part) -> _Waiting[T] | None:
        waiting = self._waiting[part]
        return min(waiting, key=lambda entry: (entry.step, entry.microbatch), default=None)
