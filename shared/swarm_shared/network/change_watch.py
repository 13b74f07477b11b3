"""Detection of a changed network, or of a machine that slept.

Connections then look alive and are not, which would go unnoticed until something is sent and stays
unacknowledged for long. Addresses are compared, and clocks: one that stands still while the machine
sleeps with one that does not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import trio

from swarm_shared.addresses.dial_order import Interfaces
from swarm_shared.base.clock import Clock, wall

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 2.0
SLEEP_GAP_SECONDS: Final = 10.0
"""Wall-clock time beyond what the process saw, above which the machine slept; a busy machine stays
far below."""


class ChangeWatch:
    """Polls addresses and clocks. `interfaces` is at most POLL_SECONDS old while `run` runs."""

    def __init__(
        self,
        on_change: Callable[[], None],
        look: Callable[[], Interfaces] = Interfaces.of_this_machine,
        wall_clock: Clock = wall,
    ) -> None:
        self._on_change = on_change
        self._look = look
        self._wall_clock = wall_clock
        self.interfaces = look()

    async def run(self) -> None:
        """Look for changes every POLL_SECONDS until cancelled."""
        wall, awake = self._wall_clock(), trio.current_time()
        while True:
            await trio.sleep(POLL_SECONDS)
            now = self._look()
            changed = now != self.interfaces
            self.interfaces = now
            next_wall, next_awake = self._wall_clock(), trio.current_time()
            # A clock that was set forward looks the same, and costs a few pings.
            slept = (next_wall - wall) - (next_awake - awake) > SLEEP_GAP_SECONDS
            wall, awake = next_wall, next_awake
            if changed or slept:
                logger.info("this machine %s", "woke up" if slept else "has other addresses")
                self._on_change()
