"""Requests to the coordinator for the stages that still have to count a microbatch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from swarm_client.pipeline.errors import MicrobatchAbandoned
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step
from swarm_shared.protocol import Mask, MaskRequest


@dataclass(slots=True, eq=False)
class _MaskQuery:
    answered: trio.Event = field(default_factory=trio.Event)
    accumulate: tuple[StageIndex, ...] | None = None


class MaskClient:
    """Matches mask requests and answers of one volunteer."""

    def __init__(self, send: Callable[[MaskRequest], bool]) -> None:
        """`send` returns whether there was a session to send over."""
        self._send = send
        self._numbers = itertools.count(1)
        self._queries: dict[int, _MaskQuery] = {}

    async def ask(self, step: Step, microbatch: MicrobatchIndex) -> tuple[StageIndex, ...]:
        """The stages that have not counted the microbatch. MicrobatchAbandoned when there is no
        answer."""
        number = next(self._numbers)
        query = self._queries[number] = _MaskQuery()
        try:
            request = MaskRequest(request=number, step=step, microbatch=microbatch)
            if not self._send(request):
                raise MicrobatchAbandoned("no coordinator: which stages counted it is unknown")
            await query.answered.wait()
        finally:
            del self._queries[number]
        if query.accumulate is None:
            raise MicrobatchAbandoned("the session ended before the coordinator answered")
        return query.accumulate

    def answer(self, mask: Mask) -> None:
        query = self._queries.get(mask.request)
        if query is not None:
            query.accumulate = mask.accumulate
            query.answered.set()

    def session_lost(self) -> None:
        for query in self._queries.values():
            query.answered.set()
