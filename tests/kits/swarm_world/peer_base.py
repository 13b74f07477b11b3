"""The base of a simulated volunteer: its life, its link, and what it holds.

A gradient is a Counter of (stage, microbatch) pairs, parameters are the tuple of applied (step,
attempt) pairs; both are checked wherever the real client would compute with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kits.swarm_world.facts import CERTIFICATE_SECONDS
from swarm_coordinator.core.events import (
    Event,
    HeartbeatsReceived,
    MessageReceived,
    PeerHeartbeat,
    SessionNumber,
)
from swarm_shared.base.types import PeerId
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import (
    AssignStage,
    ClientMessage,
    Close,
    Heartbeat,
    Lease,
    LeasedMicrobatch,
    Roster,
)

if TYPE_CHECKING:
    from kits.swarm_world.world import World


Params = tuple[tuple[int, int], ...]
REQUEST_SECONDS = 4.0
"""Seconds after which an unanswered request to a downstream peer has failed."""


@dataclass
class Link:
    """One attachment, as seen by both ends."""

    number: int
    peer: PeerBase
    open: bool = True
    up_at: float = 0.0
    down_at: float = 0.0


@dataclass
class Round:
    """One all-reduce: complete when all members have arrived, failed for all when one is lost."""

    members: tuple[PeerId, ...]
    arrived: dict[PeerId, tuple[Counter[Any], Callable[[Counter[Any] | RoundFailure], None]]] = (
        field(default_factory=dict)
    )
    failure: RoundFailure | None = None
    done: bool = False


@dataclass(frozen=True)
class RoundFailure:
    culprit: PeerId | None
    carrier_failed: bool = False


@dataclass(frozen=True)
class Parcel:
    mode: str
    step: int
    microbatch: int
    accumulate: frozenset[int]


@dataclass(frozen=True)
class Answer:
    state: str
    """"ok", "busy", "wrong_step", "failed", or "dead"."""
    receipts: tuple[Receipt, ...] = ()
    loss: float = 0.0


@dataclass
class Holding:
    """A held stage, and everything that is dropped with it."""

    stage: int
    version: int
    params: Params
    staleness: int
    held: dict[int, dict[int, Receipt]] = field(default_factory=dict)
    """step → microbatch → signed receipt."""
    unreported: list[Receipt] = field(default_factory=list)
    closing: Close | None = None
    averaged: tuple[int, Counter[Any], Counter[Any] | None] | None = None
    in_flight: int = 0

    def works_on(self, step: int) -> bool:
        """Whether it has the parameters for gradients of this step."""
        return self.version < step <= self.version + 1 + self.staleness

    def of(self, step: int) -> dict[int, Receipt]:
        return self.held.setdefault(step, {})

    def forget(self, step: int) -> None:
        self.held.pop(step, None)
        self.unreported = [receipt for receipt in self.unreported if receipt.step != step]


class PeerBase:
    """What every part of a peer works with."""

    def __init__(self, world: World, peer: PeerId) -> None:
        self.world, self.id = world, peer
        self.life = 0
        self.alive = False
        self.leaving = False
        self.gone = False
        self.hung = False
        self.woke_at = 0.0
        self.wedged = False
        self.memory_bytes = 1000
        self.speed = 1.0
        self.address = 0
        self.serving: list[tuple[PeerBase, Callable[[Answer], None]]] = []
        self._forget()

    def _forget(self) -> None:
        self.paused = False
        self.holding: Holding | None = None
        self.link: Link | None = None
        self.attached = False
        self.attached_at = 0.0
        self.generation = 0
        self.roster: Roster | None = None
        self.snapshots: dict[str, tuple[str, Params]] = {}
        self.backlog: list[tuple[int, Callable[[], object]]] = []
        self.masks: dict[int, Callable[[frozenset[int] | None], None]] = {}
        self.waiting: list[tuple[Lease, LeasedMicrobatch]] = []
        self.driving = 0
        self.window = 1
        self.assignment: AssignStage | None = None
        self.preparation: AssignStage | None = None
        self.prepared: Holding | None = None
        self.averaging = False
        self.unsaving_until = -1.0
        self.differs = False
        self.stuck = self.stalled = self.gives_nan = self.sums_nan = False
        self.slowness = 1.0
        self._masks_asked = 0

    def parted_from(self, revoked: Container[PeerId]) -> None:
        """End the links with these peers: their pending requests here get no answer."""
        kept: list[tuple[PeerBase, Callable[[Answer], None]]] = []
        for sender, reply in self.serving:
            if sender.id in revoked:
                sender.later(self.world.delay(), lambda reply=reply: reply(Answer("dead")))
            else:
                kept.append((sender, reply))
        self.serving[:] = kept

    def refuses(self, sender: PeerId) -> bool:
        """Whether the newest roster revokes the sender, or its certificate has expired."""
        since = self.world.banned.get(sender)
        expired = since is not None and self.world.now - since > CERTIFICATE_SECONDS
        return expired or (self.roster is not None and sender in self.roster.revoked)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Schedule within this process's life; a hung process acts when it wakes."""
        life = self.life
        self.world.later(seconds, lambda: self._act(life, action))

    def _act(self, life: int, action: Callable[[], object]) -> None:
        if not self.alive or life != self.life:
            return
        if self.hung:
            self.backlog.append((life, action))
        else:
            action()

    def send(self, message: ClientMessage) -> None:
        if self.link is not None:
            session = SessionNumber(self.link.number)
            if isinstance(message, Heartbeat):
                self.deliver(HeartbeatsReceived((PeerHeartbeat(session, self.id, message),)))
            else:
                self.deliver(MessageReceived(session, self.id, message))

    def deliver(self, event: Event) -> None:
        if self.link is not None and self.link.open and self.attached:
            self.world.to_coordinator(self.link, event)
