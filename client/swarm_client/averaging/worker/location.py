"""The addresses at which other peers reach this volunteer's p2pd, as they change (asyncio)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import anyio

from swarm_client.averaging.protocol.addresses import is_relayed, relayed_addresses
from swarm_client.averaging.worker.p2pd_carrier import P2pdStreams
from swarm_shared.base.errors import NetworkError

CHECK_SECONDS = 5.0
FAST_CHECK_SECONDS = 0.5
"""Seconds between two checks while a relay has not been reached, which takes about a second."""
FAST_CHECKS = 20

logger = logging.getLogger(__name__)


async def current_addresses(streams: P2pdStreams, relays: Sequence[str]) -> tuple[str, ...]:
    """The addresses without p2pd's peer ID, direct ones first. NetworkError if p2pd has ended.

    p2pd announces a relay only if it takes the relay's address for a public one, which it does not
    on a local network; therefore the relays to which p2pd is connected are counted here.
    """
    own = await streams.listen_addresses()
    connected = await streams.connected() if relays else {}
    reached = [relay for relay in relays if relay.rpartition("/p2p/")[2] in connected]
    return (*(text for text in own if not is_relayed(text)), *relayed_addresses(reached))


async def watch_addresses(
    streams: P2pdStreams,
    relays: Sequence[str],
    known: tuple[str, ...],
    moved: Callable[[tuple[str, ...]], None],
) -> None:
    """Call `moved` whenever the addresses change."""
    checks = 0
    while True:
        waits_for_relay = len(known) == 0 or sum(map(is_relayed, known)) < len(relays)
        early = waits_for_relay and checks < FAST_CHECKS
        await anyio.sleep(FAST_CHECK_SECONDS if early else CHECK_SECONDS)
        checks += 1
        try:
            now = await current_addresses(streams, relays)
        except NetworkError as error:
            logger.info("%s", error)
            continue
        if now != known:
            known = now
            moved(now)
