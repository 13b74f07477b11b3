"""Closing a step in two stages at once: the old one counts, the new one is held from then on.

Workers and the averager are replaced by ones that record their calls.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import trio

from client.pipeline.test_step_close import Handler
from kits.client.held_stage import held_stage
from swarm_client.pipeline.held_stage import Holding
from swarm_client.pipeline.step_close import AveragingFailed, StepCloser
from swarm_client.stage.protocol.errors import WorkerDied
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import AbortRound, Applied, Apply, Close, Reduction, RoundReport


@dataclass
class Worker:
    held: tuple[int, ...] = ()
    dead: bool = False
    applied: list[int] = field(default_factory=list)

    async def prepare_round(self, step: int) -> SimpleNamespace:
        if self.dead:
            raise WorkerDied("killed")
        return SimpleNamespace(microbatches=self.held, finite=True)

    async def norm(self, step: int, step_tokens: int) -> SimpleNamespace:
        return SimpleNamespace(finite=True, own_squared=4.0, tied_squared=0.0)

    async def apply(self, step: int, *_: object) -> SimpleNamespace:
        if self.dead:
            raise WorkerDied("killed")
        self.applied.append(step)
        return SimpleNamespace(version=step, digest=f"of {len(self.held)} held", norm=1.0)


class Averager:
    """Averages each stage when it is let, or fails."""

    def __init__(self) -> None:
        self.errors: dict[int, AveragingFailed] = {}
        self.waits_for: dict[int, trio.Event] = {}
        self.averaged: list[int] = []

    async def reduce(self, holding: Holding, step: int, attempt: int, reduction: Reduction) -> None:
        if holding.stage in self.waits_for:
            await self.waits_for[holding.stage].wait()
        if holding.stage in self.errors:
            raise self.errors[holding.stage]
        self.averaged.append(holding.stage)


class Scene:
    def __init__(self) -> None:
        identity = Identity.generate()
        self.me = identity.peer_id
        self.averager = Averager()
        self.old, self.new = Worker((0, 3)), Worker()
        self.holding = held_stage(
            identity, self.old, 0, counted=[(1, one) for one in self.old.held]
        )
        self.handler = Handler()
        self.handler.next_stage = held_stage(identity, self.new, 1)
        self.rounds = StepCloser(
            self.holding, SimpleNamespace(tokens_per_step=8), self.averager, self.handler
        )  # type: ignore[arg-type]

    def close(self, attempt: int = 1, moving: bool = True) -> None:
        reduction = Reduction(part="own", members=(self.me,))
        self.rounds.put(
            Close(
                step=1, attempt=attempt, committed=(0, 3), reductions=(reduction,),
                moving=(reduction,) if moving else (),
            )
        )  # fmt: skip

    def apply(self, attempt: int = 1) -> None:
        self.rounds.put(Apply(step=1, attempt=attempt, global_norm=2.0, learning_rate=0.1))

    async def report(self) -> RoundReport:
        message = await self.handler.sent()
        assert isinstance(message, RoundReport)
        return message

    async def applied(self) -> Applied:
        message = await self.handler.sent()
        assert isinstance(message, Applied)
        return message


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.rounds.run)
        yield made
        nursery.cancel_scope.cancel()


async def test_both_stages_are_averaged_and_the_new_one_is_applied_and_held() -> None:
    async with scene() as s:
        s.close()
        assert (await s.report()).ok
        assert sorted(s.averager.averaged) == [0, 1]
        s.apply()
        assert (await s.applied()).digest == "of 0 held"  # the fingerprint is of the new stage
        assert (s.old.applied, s.new.applied) == ([], [1])
        assert s.handler.switched == [s.handler.next_stage]
        assert s.handler.next_stage is not None
        assert s.handler.next_stage.version == 1
        assert s.handler.counted == [2]  # what it did in the old stage is its contribution


async def test_the_new_stage_does_not_wait_for_the_old_one() -> None:
    async with scene() as s:
        s.averager.waits_for[0] = trio.Event()
        s.close()
        with trio.fail_after(10):
            while s.averager.averaged != [1]:
                await trio.lowlevel.checkpoint()
        s.averager.waits_for[0].set()
        assert (await s.report()).ok


async def test_when_one_of_the_averages_fails_nothing_is_applied_in_either() -> None:
    for stage in (0, 1):
        async with scene() as s:
            s.averager.errors[stage] = AveragingFailed("a member is gone", None, False)
            s.averager.waits_for[1 - stage] = trio.Event()  # the other one is given up
            s.close()
            answer = await s.report()
            assert (answer.ok, answer.reason) == (False, "a member is gone")
            s.averager.errors.clear()
            s.close(attempt=2, moving=False)
            s.averager.waits_for.clear()
            assert (await s.report()).ok
            s.apply(attempt=2)
            await s.applied()
            assert (s.old.applied, s.new.applied, s.handler.switched) == ([1], [], [])
            assert s.handler.outdated == 1


async def test_an_attempt_that_is_aborted_is_not_switched_with() -> None:
    async with scene() as s:
        s.close()
        assert (await s.report()).ok
        s.rounds.put(AbortRound(step=1, attempt=1, reason="somebody died"))
        s.close(attempt=2, moving=False)
        assert (await s.report()).ok
        s.apply(attempt=2)
        await s.applied()
        assert (s.old.applied, s.new.applied, s.handler.switched) == ([1], [], [])


async def test_a_close_with_what_is_not_prepared_fails_and_counts_nothing() -> None:
    async with scene() as s:
        s.handler.next_stage = None
        s.close()
        answer = await s.report()
        assert (answer.ok, answer.reason) == (False, "no stage is prepared for this move")
        assert s.averager.averaged == []


async def test_a_new_stage_whose_worker_dies_leaves_the_old_one_alive() -> None:
    async with scene() as s:
        s.new.dead = True
        s.close()
        assert not (await s.report()).ok
        s.close(attempt=2, moving=False)
        assert (await s.report()).ok


async def test_a_worker_that_dies_when_it_should_apply_is_out_of_step() -> None:
    async with scene() as s:
        s.close()
        assert (await s.report()).ok
        s.new.dead = True
        s.apply()
        with trio.fail_after(10):
            await s.handler.rejoined.wait()
        assert s.handler.switched == []
