"""The addresses at which other peers reach this volunteer's p2pd, as they change (asyncio)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from swarm_client.averaging.protocol.addresses import is_relayed, relayed_addresses
from swarm_client.averaging.worker.hivemind_imports import Hivemind
from swarm_client.averaging.worker.p2pd_carrier import P2pdStreams
from swarm_shared.base.errors import NetworkError

CHECK_SECONDS = 5.0
FAST_CHECK_SECONDS = 0.5
"""Seconds between two checks while a relay has not been reached, which takes about a second."""
FAST_CHECKS = 20

logger = logging.getLogger(__name__)


class P2pdLocation:
    """The current addresses of p2pd.

    p2pd announces a relay only if it takes the relay's address for a public one, which it does not
    on a local network; therefore this class counts the relays to which p2pd is connected.
    """

    def __init__(
        self, hivemind: Hivemind, p2p: Any, streams: P2pdStreams, relays: Sequence[str]
    ) -> None:
        self._hivemind = hivemind
        self._p2p = p2p
        self._streams = streams
        self._relays = relays

    async def now(self) -> tuple[str, ...]:
        """The addresses without p2pd's peer ID, direct ones first. NetworkError if p2pd has
        ended."""
        try:
            _, own = await self._p2p._client.identify()
        except self._hivemind.daemon_errors as error:
            raise NetworkError(f"p2pd does not report its addresses: {error}") from error
        direct = [text for text in map(str, own) if not is_relayed(text)]
        return (*direct, *relayed_addresses(await self._connected_relays()))

    async def _connected_relays(self) -> list[str]:
        if not self._relays:
            return []
        connected = await self._streams.connected()
        return [relay for relay in self._relays if relay.rpartition("/p2p/")[2] in connected]

    async def watch(self, known: tuple[str, ...], moved: Callable[[tuple[str, ...]], None]) -> None:
        """Call `moved` whenever the addresses change."""
        checks = 0
        while True:
            waits_for_relay = len(known) == 0 or sum(map(is_relayed, known)) < len(self._relays)
            early = waits_for_relay and checks < FAST_CHECKS
            await anyio.sleep(FAST_CHECK_SECONDS if early else CHECK_SECONDS)
            checks += 1
            try:
                now = await self.now()
            except NetworkError as error:
                logger.info("%s", error)
                continue
            if now != known:
                known = now
                moved(now)
