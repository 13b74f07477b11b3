"""hivemind's DHT as the second directory: signed records that peers find without a coordinator.

The DHT node lives in the averaging worker's event loop and shares its p2pd (hivemind.DHT would fork
a process and start another one). Only members of the run are answered
(`swarm_client.averaging.worker.authorizer`). The daemon signs what it publishes; what is found is
checked here and there, because any member can store under any key.
"""

from __future__ import annotations

import logging
from typing import Any

import anyio
import anyio.lowlevel

from swarm_client.averaging.protocol.directory_record import is_record_of
from swarm_client.averaging.protocol.messages import (
    MAX_RECORDS,
    Bootstrap,
    Bootstrapped,
    Found,
    Lookup,
    Publish,
    Published,
    Record,
)
from swarm_client.averaging.worker.authorizer import RunAuthorizer
from swarm_client.averaging.worker.hivemind_imports import Hivemind
from swarm_client.averaging.worker.p2pd_carrier import P2pdStreams
from swarm_shared.base.errors import NetworkError

logger = logging.getLogger(__name__)

ENTER_SECONDS = 5.0


class DhtDirectory:
    """A DHT node; `bootstrap` joins it to other nodes."""

    def __init__(
        self, hivemind: Hivemind, node: Any, streams: P2pdStreams, authorizer: RunAuthorizer
    ) -> None:
        self._hivemind = hivemind
        self._authorizer = authorizer
        self._node = node
        self._streams = streams

    async def bootstrap(self, request: Bootstrap) -> Bootstrapped:
        """Enter the directory through peers too."""
        reached: list[str] = []
        async with anyio.create_task_group() as tasks:
            for address in request.initial_peers:
                tasks.start_soon(self._enter, address, reached)
        if reached:
            await self._node.find_nearest_nodes([self._node.node_id])
        return Bootstrapped(reached=len(reached))

    async def _enter(self, address: str, reached: list[str]) -> None:
        peer_id = address.rpartition("/p2p/")[2]
        try:
            with anyio.fail_after(ENTER_SECONDS):
                await self._streams.connect(peer_id, [address])
        except (NetworkError, TimeoutError) as error:
            logger.info("the directory cannot be entered through %s: %s", address, error)
            return
        peer = self._hivemind.PeerID.from_base58(peer_id)
        if await self._node.protocol.call_ping(peer, strict=False) is not None:
            reached.append(address)

    async def publish(self, request: Publish) -> Published:
        """Store a record; not stored when no node took it (a newer record exists)."""
        stored = await self._node.store(
            key=request.key, subkey=request.subkey, value=request.value,
            expiration_time=request.expires_unix_seconds,
        )  # fmt: skip
        return Published(stored=bool(stored))

    async def lookup(self, request: Lookup) -> Found:
        """Find the records of members under a key.

        Signatures are verified before a record takes one of the places: any member can store any
        number of entries under the key, but only one record of its own.
        """
        entries = await self._node.get(request.key, latest=True)
        membership = self._authorizer.membership
        if membership is None or entries is None or not isinstance(entries.value, dict):
            return Found(records=())
        run, organiser = membership.run, membership.organiser
        records: list[Record] = []
        for subkey, entry in entries.value.items():
            if is_record_of(subkey, entry.value, run, organiser, self._authorizer.clock()):
                records.append(Record(subkey=subkey, value=entry.value))
            if len(records) == MAX_RECORDS:
                break
            await anyio.lowlevel.checkpoint()  # thousands of signatures take seconds
        return Found(records=tuple(records))
