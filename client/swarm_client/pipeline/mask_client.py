"""Asking the coordinator which stages still have to count a microbatch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from swarm_client.pipeline.errors import MicrobatchAbandoned
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.protocol import Mask, MaskRequest


@dataclass(slots=True, eq=False)
class _Question:
    answered: trio.Event = field(default_factory=trio.Event)
    accumulate: tuple[StageIndex, ...] | None = None


class MaskDesk:
    """Matches questions and answers of one volunteer."""

    def __init__(self, send: Callable[[MaskRequest], bool]) -> None:
        """`send` says whether there was a coordinator to send to."""
        self._send = send
        self._numbers = itertools.count(1)
        self._questions: dict[int, _Question] = {}

    async def ask(
        self, step: Step, microbatch: MicrobatchIndex, suspect: PeerId
    ) -> tuple[StageIndex, ...]:
        """The stages that lack the microbatch. MicrobatchAbandoned when nobody can say."""
        number = next(self._numbers)
        question = self._questions[number] = _Question()
        try:
            request = MaskRequest(request=number, step=step, microbatch=microbatch, suspect=suspect)
            if not self._send(request):
                raise MicrobatchAbandoned("the coordinator is away: nobody knows who counted it")
            await question.answered.wait()
        finally:
            del self._questions[number]
        if question.accumulate is None:
            raise MicrobatchAbandoned("the coordinator went away before it could answer")
        return question.accumulate

    def answer(self, mask: Mask) -> None:
        question = self._questions.get(mask.request)
        if question is not None:
            question.accumulate = mask.accumulate
            question.answered.set()

    def session_lost(self) -> None:
        for question in self._questions.values():
            question.answered.set()
