"""Requests to the averaging worker about hivemind's DHT: records in, records out (trio)."""

from __future__ import annotations

from typing import Protocol, TypeVar

import trio

from swarm_client.averaging.protocol.messages import (
    Bootstrap,
    Bootstrapped,
    Found,
    Lookup,
    Publish,
    Published,
)
from swarm_client.ipc.numbered import Numbered
from swarm_shared.base.errors import LinkTimeout

DIRECTORY_SECONDS = 20.0
"""Time limit of one directory request, in seconds."""

AnswerT = TypeVar("AnswerT", bound=Numbered)


class DirectoryWorker(Protocol):
    """The part of the averaging worker's handle that directory requests need."""

    @property
    def available(self) -> bool: ...

    async def call(self, request: Numbered, expected: type[AnswerT]) -> AnswerT:
        """Send a request and return its answer. LinkClosed while there is no worker."""


class DirectoryRequests:
    """Publishes and finds records. NetworkError when the directory cannot be asked."""

    def __init__(self, worker: DirectoryWorker) -> None:
        self.bootstrap_peers: tuple[str, ...] = ()
        """Addresses through which the directory was entered last."""
        self._worker = worker

    @property
    def available(self) -> bool:
        return self._worker.available

    async def publish(
        self, key: str, subkey: str, value: bytes, expires_unix_seconds: float
    ) -> bool:
        """Store a signed record; False if no node took it."""
        request = Publish(
            key=key, subkey=subkey, value=value, expires_unix_seconds=expires_unix_seconds
        )
        return (await self._call(request, Published)).stored

    async def lookup(self, key: str) -> dict[str, bytes]:
        """Find records by subkey. Any member may have stored them: check their signatures."""
        found = await self._call(Lookup(key=key), Found)
        return {record.subkey: record.value for record in found.records}

    async def bootstrap(self, initial_peers: tuple[str, ...]) -> int:
        """Enter the directory through these (…/p2p/ID) too; returns how many of them answered."""
        self.bootstrap_peers = initial_peers
        return (await self._call(Bootstrap(initial_peers=initial_peers), Bootstrapped)).reached

    async def _call(self, request: Numbered, expected: type[AnswerT]) -> AnswerT:
        with trio.move_on_after(DIRECTORY_SECONDS):
            return await self._worker.call(request, expected)
        raise LinkTimeout(f"the directory did not answer within {DIRECTORY_SECONDS:g} s")
