"""Requests to the coordinator for the stages that still have to count a microbatch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import trio

from swarm_client.membership.coordinator_link import CoordinatorLink
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step
from swarm_shared.protocol import Mask, MaskRequest


@dataclass(slots=True, eq=False)
class _MaskQuery:
    ended: trio.Event = field(default_factory=trio.Event)
    missing: tuple[StageIndex, ...] | None = None


class MaskClient:
    """Matches mask requests and answers of one volunteer."""

    def __init__(self, coordinator: CoordinatorLink) -> None:
        self._coordinator = coordinator
        self._numbers = itertools.count(1)
        self._queries: dict[int, _MaskQuery] = {}

    async def ask(self, step: Step, microbatch: MicrobatchIndex) -> tuple[StageIndex, ...] | None:
        """Return the stages that have not counted the microbatch; None when there is no session, or
        it ends before the answer."""
        number = next(self._numbers)
        query = self._queries[number] = _MaskQuery()
        try:
            request = MaskRequest(request=number, step=step, microbatch=microbatch)
            if self._coordinator.send(request):
                await query.ended.wait()
        finally:
            del self._queries[number]
        return query.missing

    def answer(self, mask: Mask) -> None:
        query = self._queries.get(mask.request)
        if query is not None:
            query.missing = mask.accumulate
            query.ended.set()

    def session_lost(self) -> None:
        """End all questions without an answer: the next session does not know them."""
        for query in self._queries.values():
            query.ended.set()
