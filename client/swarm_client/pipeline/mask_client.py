"""Requests to the coordinator for the stages that still have to count a microbatch."""

from __future__ import annotations

import itertools
from contextlib import suppress

import trio

from swarm_client.membership.coordinator_link import CoordinatorLink
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step
from swarm_shared.protocol import Mask, MaskRequest


class MaskClient:
    """Matches mask requests and answers of one volunteer."""

    def __init__(self, coordinator: CoordinatorLink) -> None:
        self._coordinator = coordinator
        self._numbers = itertools.count(1)
        self._queries: dict[int, trio.MemorySendChannel[tuple[StageIndex, ...]]] = {}

    async def ask(self, step: Step, microbatch: MicrobatchIndex) -> tuple[StageIndex, ...] | None:
        """Return the stages that have not counted the microbatch; None when there is no session, or
        it ends before the answer."""
        number = next(self._numbers)
        self._queries[number], answer = trio.open_memory_channel[tuple[StageIndex, ...]](1)
        try:
            request = MaskRequest(request=number, step=step, microbatch=microbatch)
            return await answer.receive() if self._coordinator.send(request) else None
        except trio.EndOfChannel:
            return None
        finally:
            del self._queries[number]

    def answer(self, mask: Mask) -> None:
        """Hand the coordinator's answer to the question that waits for it."""
        query = self._queries.get(mask.request)
        if query is not None:
            with suppress(trio.WouldBlock, trio.ClosedResourceError):  # answered already
                query.send_nowait(mask.accumulate)

    def session_lost(self) -> None:
        """End all questions without an answer: the next session does not know them."""
        for query in self._queries.values():
            query.close()
