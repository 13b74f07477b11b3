"""Asking the averaging worker about hivemind's DHT: records in, records out. trio."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from swarm_client.averaging.handle.requests import Requests
from swarm_client.averaging.protocol.messages import (
    Bootstrap,
    Bootstrapped,
    DirectoryRequestFailed,
    Found,
    Lookup,
    Publish,
    Published,
    WorkerMessage,
)
from swarm_shared.base.errors import LinkTimeout, NetworkError
from swarm_shared.base.frozen_model import FrozenModel

DIRECTORY_SECONDS = 20.0

MessageT = TypeVar("MessageT")


class DirectoryRequests:
    """`ask` raises LinkClosed while there is no worker."""

    def __init__(
        self,
        requests: Requests,
        ask: Callable[[int, FrozenModel], Awaitable[WorkerMessage]],
        is_available: Callable[[], bool],
    ) -> None:
        self.bootstrap_peers: tuple[str, ...] = ()
        """Through which the directory was entered last."""
        self._requests = requests
        self._ask = ask
        self._is_available = is_available

    @property
    def available(self) -> bool:
        return self._is_available()

    async def publish(
        self, key: str, subkey: str, value: bytes, expires_unix_seconds: float
    ) -> bool:
        """Store a signed record in the directory. NetworkError when it cannot be asked."""
        number = self._requests.new_number()
        encoded = base64.b64encode(value).decode()
        message = Publish(
            request=number,
            key=key,
            subkey=subkey,
            value_base64=encoded,
            expires_unix_seconds=expires_unix_seconds,
        )
        return (await self._answer(number, message, Published)).stored

    async def lookup(self, key: str) -> dict[str, bytes]:
        """Records by subkey, as any member may have stored them: check their signatures."""
        number = self._requests.new_number()
        found = await self._answer(number, Lookup(request=number, key=key), Found)
        return {record.subkey: base64.b64decode(record.value_base64) for record in found.records}

    async def bootstrap(self, initial_peers: tuple[str, ...]) -> int:
        """Enter the directory through these (…/p2p/ID) too; how many of them answered."""
        self.bootstrap_peers = initial_peers
        number = self._requests.new_number()
        message = Bootstrap(request=number, initial_peers=initial_peers)
        return (await self._answer(number, message, Bootstrapped)).reached

    async def _answer(
        self, number: int, message: Publish | Lookup | Bootstrap, expected: type[MessageT]
    ) -> MessageT:
        with trio.move_on_after(DIRECTORY_SECONDS):
            answer = await self._ask(number, message)
            if isinstance(answer, expected):
                return answer
            assert isinstance(answer, DirectoryRequestFailed)
            raise NetworkError(f"the directory did not answer: {answer.reason}")
        raise LinkTimeout(f"the directory did not answer within {DIRECTORY_SECONDS:g} s")
