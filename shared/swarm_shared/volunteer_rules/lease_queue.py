"""The leased microbatches of one trainer: when each starts, and which go back to the coordinator.

Invariants:

1. Every microbatch of an accepted lease is started at most once, and ends exactly once: by a
   result, by a hand-back, or silently because its step is over (the coordinator does not lease it
   again).
2. No more microbatches are started than the in-flight window allows
   (`swarm_shared.scheduling.inflight_window`), which the coordinator bounds in every lease.
3. An older step comes first: its missing microbatches delay its close, and every later step.
4. While leases are refused (a pause, or leaving), nothing waits.
5. At most MAX_WAITING wait and at most MAX_IN_FLIGHT are started, whatever the coordinator leases:
   each takes memory.

Pure: time is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.types import MAX_MICROBATCHES, MAX_SENTENCE_CHARACTERS, Step
from swarm_shared.protocol import Lease, LeasedMicrobatch, LeaseResult
from swarm_shared.scheduling.inflight_window import InFlightWindow, SendRecord

MAX_WAITING = MAX_MICROBATCHES
"""Most microbatches that wait; a coordinator leases a trainer its window, and no more than a step
has."""

MAX_IN_FLIGHT = 4096
"""Most microbatches that one trainer has in flight; the longest queue of a peer holds as many."""


@dataclass(frozen=True, slots=True)
class StartedMicrobatch:
    """A microbatch to compute now; exactly one call of `finished` follows."""

    lease: Lease
    leased: LeasedMicrobatch
    sent: SendRecord


def handed_back(lease: Lease, leased: LeasedMicrobatch, reason: str = "") -> LeaseResult:
    """The message that returns a microbatch to the coordinator; `reason` is empty if the microbatch
    was not started."""
    return LeaseResult(
        step=lease.step, microbatch=leased.microbatch, lease=lease.lease,
        ok=False, reason=reason[:MAX_SENTENCE_CHARACTERS],
    )  # fmt: skip


class LeaseQueue:
    """Leases in, microbatches to start out."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Lease, LeasedMicrobatch]] = []
        self._flight = InFlightWindow()
        self._min_window, self._max_window = 1, 1
        self._refusing = False
        """Whether no lease is accepted for now, or any more."""
        self._leaving = False

    def take(self, lease: Lease) -> list[LeaseResult]:
        """Accept a lease; return the results of microbatches that are handed back at once.
        ProtocolError where too many wait."""
        if len(self._waiting) + len(lease.microbatches) > MAX_WAITING:
            raise ProtocolError(
                f"the coordinator leases {len(lease.microbatches)} microbatches, and "
                f"{len(self._waiting)} wait already; this volunteer attaches again"
            )
        self._min_window = min(max(1, lease.window), MAX_IN_FLIGHT)
        self._max_window = min(max(self._min_window, lease.max_window), MAX_IN_FLIGHT)
        self._waiting.extend((lease, leased) for leased in lease.microbatches)
        self._waiting.sort(key=lambda entry: entry[0].step)
        return self._hand_back() if self._refusing else []

    def start(self, oldest_step: Step | None, now: float) -> list[StartedMicrobatch]:
        """The microbatches to start now. Steps before `oldest_step` are over; None if this peer
        holds no stage, so that it does not know which steps are over."""
        if oldest_step is not None:
            self._waiting = [entry for entry in self._waiting if entry[0].step >= oldest_step]
        free = self._flight.size(self._min_window, self._max_window) - self._flight.in_flight
        begun, self._waiting = self._waiting[: max(0, free)], self._waiting[max(0, free) :]
        return [StartedMicrobatch(lease, leased, self._flight.sent(now)) for lease, leased in begun]

    def finished(self, microbatch: StartedMicrobatch, now: float, *, ok: bool) -> None:
        """Record the end of a started microbatch."""
        if ok:
            self._flight.returned(microbatch.sent, now)
        else:
            self._flight.failed()

    def leave(self) -> list[LeaseResult]:
        """Accept no lease any more; return the results that hand waiting microbatches back."""
        self._leaving = True
        return self._refuse()

    def pause(self) -> list[LeaseResult]:
        """Accept no lease until `resume`; return the results that hand waiting microbatches
        back."""
        return [] if self._leaving else self._refuse()

    def resume(self) -> None:
        """Accept leases again, unless the volunteer is leaving."""
        if not self._leaving:
            self._refusing = False

    def _refuse(self) -> list[LeaseResult]:
        self._refusing = True
        return self._hand_back()

    def _hand_back(self) -> list[LeaseResult]:
        waiting, self._waiting = self._waiting, []
        return [handed_back(lease, leased) for lease, leased in waiting]
