"""Close, abort and apply at one peer: it averages exactly the commit set, or reports why not.

The worker and the averager are replaced by ones that record their calls.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import trio

from kits.client.held_stage import held_stage
from swarm_client.pipeline.held_stage import Holding
from swarm_client.pipeline.step_close import MAX_QUEUED_ORDERS, AveragingFailed, StepCloser
from swarm_client.stage.protocol.errors import RequestFailed
from swarm_shared.base.errors import ProtocolError
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import AbortRound, Applied, Apply, Close, Reduction, RoundReport


@dataclass
class Worker:
    held: set[int] = field(default_factory=set)
    can_uncommit: bool = True
    finite: bool = True
    can_apply: bool = True
    resets: int = 0
    applied: list[tuple[int, float]] = field(default_factory=list)

    async def prepare_round(self, step: int) -> SimpleNamespace:
        return SimpleNamespace(microbatches=tuple(sorted(self.held)), finite=self.finite)

    async def uncommit(self, step: int, microbatches: tuple[int, ...]) -> bool:
        if self.can_uncommit:
            self.held -= set(microbatches)
        return self.can_uncommit

    async def reset_accumulator(self, step: int) -> None:
        assert step == 1
        self.resets += 1
        self.held.clear()

    async def norm(self, step: int, step_tokens: int) -> SimpleNamespace:
        return SimpleNamespace(finite=True, own_squared=4.0, tied_squared=0.0)

    async def apply(
        self, step: int, step_tokens: int, global_norm: float, learning_rate: float
    ) -> SimpleNamespace:
        if not self.can_apply:
            raise RequestFailed("not_finite", "it holds a NaN by now")
        self.applied.append((step, global_norm))
        self.held.clear()
        return SimpleNamespace(version=step, digest="d", norm=1.0)


class Averager:
    """Averages at once, fails, or waits until it is called off."""

    def __init__(self) -> None:
        self.error: AveragingFailed | None = None
        self.wait = False
        self.waits_in: set[int] = set()
        """Attempts in which the others never come."""
        self.entered = trio.Event()
        self.rounds: list[tuple[int, int, str]] = []

    async def reduce(self, holding: Holding, step: int, attempt: int, reduction: Reduction) -> None:
        self.rounds.append((step, attempt, reduction.part))
        self.entered.set()
        if self.wait or attempt in self.waits_in:
            await trio.sleep_forever()
        if self.error is not None:
            raise self.error


class Handler:
    """In the stage manager's place: records what it is called with."""

    def __init__(self) -> None:
        self.next_stage: Holding | None = None
        self.switched: list[Holding] = []
        self.outdated = 0
        self.counted: list[int] = []
        self.rejoined = trio.Event()
        self._put, self._sent = trio.open_memory_channel[object](100)

    def send(self, message: object) -> None:
        self._put.send_nowait(message)

    async def sent(self) -> object:
        return await self._sent.receive()

    async def save_snapshot(self, holding: Holding, request: object) -> None:
        raise AssertionError("no snapshot was requested")

    def step_applied(self, holding: Holding, apply: Apply, counted: int) -> None:
        self.counted.append(counted)

    def rejoin(self) -> None:
        self.rejoined.set()

    def prepared(self) -> Holding | None:
        return self.next_stage

    def switch_to_prepared(self, prepared: Holding) -> None:
        self.switched.append(prepared)

    def drop_outdated(self) -> None:
        self.outdated += 1


class Scene:
    def __init__(self, held: set[int], next_held: tuple[int, ...] = ()) -> None:
        """`next_held` is accumulated of step 2, which is worked on with staleness 1."""
        identity = Identity.generate()
        self.me = identity.peer_id
        self.worker = Worker(held)
        self.averager = Averager()
        self.holding = held_stage(
            identity, self.worker, 0, staleness=1 if next_held else 0,
            counted=[(1, one) for one in sorted(held)] + [(2, one) for one in next_held],
        )  # fmt: skip
        self.handler = Handler()
        manifest = SimpleNamespace(tokens_per_step=8)
        self.rounds = StepCloser(self.holding, manifest, self.averager, self.handler)  # type: ignore[arg-type]

    def close(self, committed: tuple[int, ...], step: int = 1, attempt: int = 1) -> None:
        reduction = Reduction(part="own", members=(self.me,))
        self.rounds.put(
            Close(step=step, attempt=attempt, committed=committed, reductions=(reduction,))
        )

    def apply(self, step: int = 1, attempt: int = 1) -> None:
        self.rounds.put(Apply(step=step, attempt=attempt, global_norm=2.0, learning_rate=0.1))

    async def said(self) -> object:
        return await self.handler.sent()


@asynccontextmanager
async def scene(*held: int, next_held: tuple[int, ...] = ()) -> AsyncIterator[Scene]:
    made = Scene(set(held), next_held)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.rounds.run)
        yield made
        nursery.cancel_scope.cancel()


async def report(s: Scene) -> RoundReport:
    message = await s.said()
    assert isinstance(message, RoundReport)
    return message


async def test_what_is_held_and_committed_is_averaged_and_applied_once() -> None:
    async with scene(0, 3) as s:
        s.close((0, 3))
        assert (await report(s)).ok
        assert s.holding.account.closing
        s.apply()
        assert isinstance(await s.said(), Applied)
        assert s.holding.version == 1
        assert not s.holding.account.closing
        assert s.worker.applied == [(1, 2.0)]
        assert s.handler.counted == [2]
        assert s.holding.account.receipts() == ()


async def test_a_surplus_is_taken_out_before_the_round() -> None:
    async with scene(0, 3, 5) as s:
        s.close((0, 3))
        assert (await report(s)).ok
        assert s.worker.held == {0, 3}
        assert s.holding.account.receipt(1, 5) is None


async def test_a_surplus_that_cannot_be_taken_out_empties_the_accumulator_and_is_reported() -> None:
    async with scene(0, 3, 5) as s:
        s.worker.can_uncommit = False
        s.close((0, 3))
        answer = await report(s)
        assert (answer.ok, answer.reset) == (False, True)
        assert s.worker.resets == 1
        assert s.averager.rounds == []
        assert s.holding.account.receipts() == ()


async def test_what_is_committed_and_not_held_is_named() -> None:
    async with scene(0) as s:
        s.close((0, 7, 9))
        answer = await report(s)
        assert (answer.ok, answer.missing) == (False, (7, 9))
        assert s.averager.rounds == []


async def test_a_failed_average_is_reported_with_its_culprit_and_can_be_tried_again() -> None:
    async with scene(0) as s:
        culprit = Identity.generate().peer_id
        s.averager.error = AveragingFailed("lost", culprit, carrier_failed=True)
        s.close((0,))
        answer = await report(s)
        assert (answer.ok, answer.culprit, answer.carrier_failed) == (False, culprit, True)
        s.rounds.put(AbortRound(step=1, attempt=1, reason="as told"))
        s.averager.error = None
        s.close((0,), attempt=2)
        assert (await report(s)).ok
        assert s.worker.held == {0}


async def test_an_abort_ends_a_round_in_the_middle_and_leaves_the_accumulator() -> None:
    async with scene(0) as s:
        s.averager.wait = True
        s.close((0,))
        await s.averager.entered.wait()
        s.rounds.put(AbortRound(step=1, attempt=1, reason="somebody died"))
        s.averager.wait = False
        s.close((0,), attempt=2)
        answer = await report(s)
        assert (answer.ok, answer.attempt) == (True, 2)
        assert s.worker.held == {0}


async def test_an_attempt_that_was_called_off_before_it_began_is_not_begun() -> None:
    """The abort of an earlier one takes a moment, and meanwhile the coordinator tries again."""
    async with scene(0) as s:
        s.averager.waits_in = set(range(1, 100))
        for attempt in range(1, 100):
            s.close((0,), attempt=attempt)
            s.rounds.put(AbortRound(step=1, attempt=attempt, reason="somebody died"))
        s.close((0,), attempt=100)
        with trio.fail_after(5):
            answer = await report(s)
        assert (answer.ok, answer.attempt) == (True, 100)
        assert s.averager.rounds == [(1, 100, "own")]


async def test_an_attempt_of_a_session_that_is_over_is_not_begun() -> None:
    async with scene(0) as s:
        s.averager.waits_in = {1, 2}
        s.close((0,))
        await s.averager.entered.wait()
        s.close((0,), attempt=2)
        s.rounds.session_lost()
        s.close((0,), attempt=3)
        with trio.fail_after(5):
            answer = await report(s)
        assert (answer.ok, answer.attempt) == (True, 3)
        assert [attempt for _, attempt, _ in s.averager.rounds] == [1, 3]


async def test_orders_that_come_faster_than_they_can_be_carried_out_end_the_session() -> None:
    async with scene(0) as s:
        s.averager.wait = True
        s.close((0,))
        await s.averager.entered.wait()
        for attempt in range(2, 2 + MAX_QUEUED_ORDERS):
            s.close((0,), attempt=attempt)
        with pytest.raises(ProtocolError, match="already wait"):
            s.close((0,), attempt=1000)


async def test_a_step_that_was_not_averaged_here_is_never_applied_and_the_peer_joins_anew() -> None:
    async with scene(0) as s:
        s.close((0,), attempt=1)
        assert (await report(s)).ok
        s.apply(attempt=2)
        await s.handler.rejoined.wait()
        assert s.worker.applied == []
        assert s.holding.version == 0


async def test_a_close_of_another_step_is_answered_and_not_taken_part_in() -> None:
    async with scene(0) as s:
        s.close((0,), step=4)
        assert not (await report(s)).ok
        assert s.averager.rounds == []


async def test_a_sum_that_is_not_finite_is_thrown_away_before_others_get_it() -> None:
    async with scene(0, 3) as s:
        s.worker.finite = False
        s.close((0, 3))
        answer = await report(s)
        assert (answer.ok, answer.reset, answer.not_finite) == (False, True, True)
        assert s.averager.rounds == []
        assert s.holding.account.receipts() == ()


async def test_a_step_that_cannot_be_applied_is_reported_and_does_not_end_the_volunteer() -> None:
    async with scene(0) as s:
        s.close((0,))
        assert (await report(s)).ok
        s.worker.can_apply = False
        s.apply()
        answer = await report(s)
        assert (answer.ok, answer.reset) == (False, True)
        assert s.holding.averaged_attempt is None
        s.close((0,), attempt=2)
        assert (await report(s)).ok


async def test_what_was_counted_of_the_next_step_outlives_the_apply_of_this_one() -> None:
    async with scene(0, 3, next_held=(3, 5)) as s:
        s.close((0, 3))
        assert (await report(s)).ok
        assert s.holding.account.closes(1)
        assert not s.holding.account.closes(2)
        s.apply()
        assert isinstance(await s.said(), Applied)
        assert s.handler.counted == [2]
        assert [s.holding.account.receipt(step, 3) is None for step in (1, 2)] == [True, False]
        assert len(s.holding.account.receipts()) == 2
        s.worker.held |= {3, 5}
        s.close((3, 5), step=2, attempt=2)
        assert (await report(s)).ok


async def test_an_accumulator_that_is_emptied_takes_the_receipts_of_its_step_along() -> None:
    async with scene(0, 3, 5, next_held=(3, 5)) as s:
        s.worker.can_uncommit = False
        s.close((0, 3))
        assert (await report(s)).reset
        assert s.holding.account.count(1) == 0
        assert s.holding.account.count(2) == 2


async def test_the_next_step_does_not_close_before_this_one_was_applied() -> None:
    async with scene(3, next_held=(3,)) as s:
        s.close((3,), step=2)
        answer = await report(s)
        assert (answer.step, answer.ok, answer.missing) == (2, False, (3,))
        assert s.averager.rounds == []
        s.close((3,))
        assert (await report(s)).ok
        s.apply(step=2)
        await s.handler.rejoined.wait()
        assert s.worker.applied == []
