"""What a volunteer offers after the memory of its device has not sufficed for a stage that it held.

Another program may take memory that was free when the stage was chosen. The worker then keeps less
of each microbatch (`swarm_client.stage.worker.graph_memory`). When even the least fails, the stage
is handed over, and for a while only smaller ones are asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import trio

from swarm_shared.base.backoff import Backoff
from swarm_shared.base.memory import MemoryOffer, StageMemory

FIRST_SHORTAGE_SECONDS = 600.0
"""Seconds for which a stage that did not fit is not taken again; doubled each time."""

MAX_SHORTAGE_SECONDS = 6 * 3600.0
"""Longest of these times. After as long without a shortage they begin again with the first."""


@dataclass(slots=True)
class MemoryShortage:
    """The latest shortage of one device. Times are those of one monotonic clock, in seconds."""

    _stage: StageMemory | None = None
    """The memory that the stage which did not fit takes."""
    _until: float = -math.inf
    _begun: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)
    _backoff: Backoff = field(
        default_factory=lambda: Backoff(FIRST_SHORTAGE_SECONDS, MAX_SHORTAGE_SECONDS)
    )

    def began(self, stage: StageMemory, now: float) -> None:
        """Begin a shortage, in which the device offers less than a stage of this size takes."""
        if now - self._until > MAX_SHORTAGE_SECONDS:
            self._backoff.reset()
        self._stage, self._until = stage, now + self._backoff.next()
        self.offer_fell()

    def offer_fell(self) -> None:
        """Report that less is offered than the held stage takes."""
        self._begun.unpark_all()

    def lift(self) -> None:
        """Offer everything again from now on."""
        self._stage = None

    async def wait_begun(self) -> None:
        """Wait for the next shortage."""
        await self._begun.park()

    def seconds_left(self, now: float) -> float:
        """Return the seconds until the whole offer counts again."""
        return max(0.0, self._until - now)

    def remaining(self, offer: MemoryOffer, now: float) -> MemoryOffer:
        """Return what is left of an offer: less than the stage that did not fit takes."""
        if self._stage is None or now >= self._until or not offer.holds(self._stage):
            return offer
        on_host = self._stage.host_bytes if offer.host_bytes is None else 0
        return offer.replaced(max(0, self._stage.device_bytes + on_host - 1))
