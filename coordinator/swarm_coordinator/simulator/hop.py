"""A simulated sender's requests to one stage: the choice of a peer, credits, retries and masks.

The production routing chooses, fed with the production formula for observations. A sender requests
a mask from the coordinator before it retries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm_coordinator.simulator.event_heap import Action
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.identity.credentials import Receipt
from swarm_shared.scheduling.routing import Observation, ShortestExpectedDelay

# The values of the client.

BUSY_PAUSE_SECONDS = 0.05
"""Seconds before a request is repeated that a full queue has refused."""

STEP_PAUSE_SECONDS = 0.1
"""Seconds before a request is repeated that a peer at another step has refused."""

CAPACITY_WAIT_SECONDS = 1.0
"""Seconds before the choice of a peer is repeated while none has capacity."""

MAXIMUM_ATTEMPTS = 8
"""Failed attempts after which a microbatch has failed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one microbatch: its receipts, or why there is no gradient."""

    state: str
    """"ok", "busy", "wrong step", or "failed"."""
    receipts: tuple[Receipt, ...] = ()
    service_seconds: float = 0.0
    total_seconds: float = 0.0
    uplink_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RoutedMicrobatch:
    """One microbatch with its accumulate mask."""

    step: Step
    microbatch: MicrobatchIndex
    accumulate: frozenset[StageIndex]


Answered = Callable[[Answer], None]
Missing = Callable[[tuple[StageIndex, ...] | None], None]


@dataclass(slots=True)
class Request:
    """One attempt to have one peer process one microbatch."""

    target: PeerId
    answered: Answered
    open: bool = True


class Sender(Protocol):
    """The sending node: its clock, its roster, and its transport."""

    known: dict[PeerId, StageIndex]

    @property
    def now(self) -> float: ...
    @property
    def edge_credits(self) -> int: ...
    def works_on(self, step: Step) -> bool: ...
    def members(self, stage: StageIndex) -> Sequence[PeerId]: ...
    def later(self, seconds: float, action: Action) -> None: ...
    def ask_mask(self, parcel: RoutedMicrobatch, answer: Missing) -> None: ...
    def deliver(self, stage: StageIndex, parcel: RoutedMicrobatch, request: Request) -> None: ...
    def answer(self, request: Request, answer: Answer) -> None: ...


class Hop:
    """A sender's requests to one stage: corresponds to the client's `Downstream`."""

    def __init__(self, sender: Sender, stage: StageIndex) -> None:
        self._sender, self.stage = sender, stage
        self._routing = ShortestExpectedDelay()
        self._outstanding: dict[PeerId, list[Request]] = {}
        self._waiting: deque[Action] = deque()

    def send(self, parcel: RoutedMicrobatch, done: Answered, failures: int = 0) -> None:
        sender = self._sender
        if not sender.works_on(parcel.step) or failures >= MAXIMUM_ATTEMPTS:
            done(Answer("failed"))
            return
        target = self._choose()
        if target is None:
            self._wait(lambda: self.send(parcel, done, failures))
            return
        began = sender.now
        requests = self._outstanding.setdefault(target, [])
        in_flight = len(requests) + 1

        def answered(answer: Answer) -> None:
            requests.remove(request)
            self.capacity()
            if answer.state == "ok":
                link_seconds = max(0.0, sender.now - began - answer.total_seconds)
                seen = Observation(
                    answer.service_seconds, answer.uplink_seconds, link_seconds, in_flight
                )
                self._routing.observe(target, seen, sender.now)
                done(answer)
            elif answer.state in ("busy", "wrong step"):
                self._routing.refused(target, sender.now)
                pause = BUSY_PAUSE_SECONDS if answer.state == "busy" else STEP_PAUSE_SECONDS
                sender.later(pause, lambda: self.send(parcel, done, failures))
            else:
                self._routing.failed(target, sender.now)
                sender.ask_mask(parcel, masked)

        def masked(missing: tuple[StageIndex, ...] | None) -> None:
            if missing is None:
                done(Answer("failed"))
                return
            again = frozenset(stage for stage in missing if stage >= self.stage)
            self.send(RoutedMicrobatch(parcel.step, parcel.microbatch, again), done, failures + 1)

        request = Request(target, answered)
        requests.append(request)
        sender.deliver(self.stage, parcel, request)

    def _choose(self) -> PeerId | None:
        members = self._sender.members(self.stage)
        self._routing.update(members)
        credits = self._sender.edge_credits
        in_flight = {p: len(self._outstanding.get(p, ())) for p in members}
        usable = {p: count for p, count in in_flight.items() if count < credits}
        return self._routing.choose(self._sender.now, usable)

    def _wait(self, action: Action) -> None:
        self._waiting.append(action)
        end = self._routing.next_ban_end(self._sender.now)
        pause = CAPACITY_WAIT_SECONDS if end is None else max(0.01, end - self._sender.now)
        self._sender.later(pause, self.capacity)

    def capacity(self) -> None:
        """Retry the waiting requests in their order, since a peer may have capacity again."""
        waiting, self._waiting = self._waiting, deque()
        for action in waiting:
            action()

    def roster_changed(self) -> None:
        known = self._sender.known
        for target in [t for t in self._outstanding if t not in known]:
            for request in list(self._outstanding[target]):
                self._sender.answer(request, Answer("failed"))
        self.capacity()
