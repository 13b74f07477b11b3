"""The work of a step close: each decision of the rules is carried out in the right worker, and each
result goes back to them.

The workers and the averager are replaced by ones that record their calls.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from kits.client.held_stage import held_stage
from swarm_client.averaging.all_reduce.errors import RoundFailed, RoundFailure
from swarm_client.pipeline.held_stage import Holding, LoadedStage
from swarm_client.pipeline.step_close import StepCloser
from swarm_client.stage.protocol.errors import WorkerDied
from swarm_shared.base.errors import LinkClosed, ProtocolError, StorageError
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import (
    AbortRound,
    Applied,
    Apply,
    Close,
    Reduction,
    RoundReport,
    SaveSnapshot,
    SnapshotFailed,
    SnapshotReady,
    SumCheck,
    SumsChecked,
)
from swarm_shared.volunteer_rules.step_close import (
    MAX_QUEUED_ORDERS,
    DropPrepared,
    Send,
    StepApplied,
    SwitchToPrepared,
)

ME, CULPRIT = Identity.generate(), Identity.generate().peer_id


@dataclass
class Worker:
    held: set[int] = field(default_factory=set)
    stage: int = 0
    finite: bool = True
    can_uncommit: bool = True
    error: Exception | None = None
    """Raised by the next request."""
    calls: list[str] = field(default_factory=list)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.error is not None:
            raise self.error

    async def prepare_round(self, step: int) -> SimpleNamespace:
        self._called(f"prepare {step}")
        return SimpleNamespace(microbatches=tuple(sorted(self.held)), finite=self.finite)

    async def uncommit(self, step: int, microbatches: tuple[int, ...]) -> bool:
        self._called(f"uncommit {step} {microbatches}")
        self.held -= set(microbatches if self.can_uncommit else ())
        return self.can_uncommit

    async def reset_accumulator(self, step: int) -> None:
        self._called(f"reset {step}")

    async def norm(self, step: int, step_tokens: int) -> SimpleNamespace:
        self._called(f"norm {step} of {step_tokens}")
        return SimpleNamespace(finite=True, own_squared=4.0, tied_squared=0.5)

    async def apply(
        self, step: int, step_tokens: int, norm: float, learning_rate: float
    ) -> SimpleNamespace:
        self._called(f"apply {step} of {step_tokens} with {norm}, {learning_rate}")
        return SimpleNamespace(version=step, digest=f"of stage {self.stage}", norm=1.0)


class Scene:
    """In the place of the averager, the snapshots and the stage manager."""

    def __init__(self, nursery: trio.Nursery, held: tuple[int, ...]) -> None:
        self.worker, self.next = Worker(set(held)), Worker(stage=1)
        self.error: RoundFailed | None = None
        self.entered, self.left, self.go = trio.Event(), trio.Event(), trio.Event()
        self.go.set()
        self.can_save = True
        self.decisions: list[object] = []
        self._put, self._sent = trio.open_memory_channel[object](100)
        self.holding = held_stage(ME, self.worker, 0, counted=[(1, m) for m in held])
        self.prepared = held_stage(ME, self.next, 1)
        self.over: list[tuple[int, int]] = []
        """Attempts of which nothing is kept any more."""
        self.lost = False
        """Whether what is kept of a round is lost."""
        self.closer = StepCloser(self.holding, 8, self, self, self, self, nursery)

    async def reduce(self, worker: Any, step: int, attempt: int, reduction: Reduction) -> None:
        self.entered.set()
        try:
            await self.go.wait()
        finally:
            self.left.set()
        worker.calls.append(f"reduce {step}, {attempt}, {reduction.part}")
        if self.error is not None:
            raise self.error

    def attempt_over(self, step: int, attempt: int) -> None:
        self.over.append((step, attempt))

    async def state(self, check: SumCheck, close: Close, held: Any, prepared: Any) -> SumsChecked:
        if self.lost:
            raise LinkClosed("the averaging worker is away")
        assert check.attempt == close.attempt
        held.calls.append(f"sums {check.step}, {check.attempt}")
        if close.moving:
            prepared.calls.append(f"sums {check.step}, {check.attempt}")
        return SumsChecked(
            step=check.step, attempt=check.attempt, details=check.details, statement="signed"
        )

    async def save(self, holding: Holding, request: SaveSnapshot) -> SnapshotReady:
        assert holding is self.holding
        if not self.can_save:
            raise StorageError("the disk is full")
        return SnapshotReady(version=request.version, stage=0, item="a", bytes=1, sha256="0" * 64)

    def close_decided(self, decision: object) -> None:
        if isinstance(decision, Send):
            self._put.send_nowait(decision.message)
        else:
            self.decisions.append(decision)

    async def sent(self) -> Any:
        with trio.fail_after(10):
            return await self._sent.receive()

    def prepare(self) -> None:
        self.closer.stage_prepared(LoadedStage(self.prepared.worker, self.prepared.account))

    def close(self, *committed: int, attempt: int = 1, moving: bool = False) -> None:
        parts = tuple(Reduction(part=part, members=(ME.peer_id,)) for part in ("own", "tied"))
        order = Close(
            step=1, attempt=attempt, committed=committed, reductions=parts,
            moving=parts[:1] if moving else (),
        )  # fmt: skip
        self.closer.put(order)

    def check(self, attempt: int = 1, *, details: bool = False) -> None:
        self.closer.put(SumCheck(step=1, attempt=attempt, seed="5eed" * 8, details=details))

    def apply(self, attempt: int = 1) -> None:
        self.closer.put(Apply(step=1, attempt=attempt, global_norm=2.0, learning_rate=0.1))


@asynccontextmanager
async def scene(*held: int) -> AsyncIterator[Scene]:
    async with trio.open_nursery() as nursery:
        yield Scene(nursery, held)
        nursery.cancel_scope.cancel()


async def test_a_step_is_closed_and_applied_in_the_held_stages_worker() -> None:
    async with scene(0, 3, 5) as s:
        s.close(0, 3)
        assert await s.sent() == RoundReport(
            step=1, attempt=1, ok=True, own_squared=4.0, tied_squared=0.5
        )
        assert s.holding.close.averaged_attempt == 1
        s.apply()
        assert await s.sent() == Applied(step=1, digest="of stage 0", norm=1.0)
        assert s.worker.calls == [
            "prepare 1", "uncommit 1 (5,)", "prepare 1", "reduce 1, 1, own", "reduce 1, 1, tied",
            "norm 1 of 8", "apply 1 of 8 with 2.0, 0.1",
        ]  # fmt: skip
        assert s.decisions == [StepApplied(0, 1, 2), DropPrepared()]


@pytest.mark.parametrize("moving", [True, False])
async def test_the_sums_of_an_averaged_attempt_are_stated(moving: bool) -> None:
    async with scene(0) as s:
        s.prepare()
        s.close(0, moving=moving)
        assert (await s.sent()).ok
        for details in (False, True):
            s.check(details=details)
            assert await s.sent() == SumsChecked(
                step=1, attempt=1, details=details, statement="signed"
            )
        assert s.worker.calls.count("sums 1, 1") == 2
        assert s.next.calls.count("sums 1, 1") == 2 * moving
        assert s.over == []
        s.apply()
        assert isinstance(await s.sent(), Applied)
        assert s.over == [(1, 1)]


async def test_sums_that_cannot_be_stated_fail_the_attempt() -> None:
    async with scene(0) as s:
        s.close(0)
        assert (await s.sent()).ok
        s.lost = True
        s.check(details=True)
        assert await s.sent() == RoundReport(
            step=1, attempt=1, ok=False, reason="the averaging worker is away"
        )
        s.closer.put(AbortRound(step=1, attempt=1, reason="its sums were not stated"))
        assert s.over == [(1, 1)]


async def test_an_accumulator_is_emptied_before_its_loss_is_reported() -> None:
    async with scene(0, 5) as s:
        s.worker.can_uncommit = False
        s.close(0)
        assert (await s.sent()).reset
        assert s.worker.calls[-1] == "reset 1"


async def test_a_failed_average_names_its_culprit() -> None:
    async with scene(0) as s:
        s.error = RoundFailed("lost", CULPRIT, failure=RoundFailure.CARRIER)
        s.close(0)
        report = await s.sent()
        assert (report.reason, report.culprit, report.carrier_failed) == (
            "all-reduce: lost",
            CULPRIT,
            True,
        )


async def test_an_aborted_attempt_is_called_off_at_once() -> None:
    async with scene(0) as s:
        s.go = trio.Event()
        s.close(0)
        await s.entered.wait()
        s.closer.put(AbortRound(step=1, attempt=1, reason="a member died"))
        with trio.fail_after(5):
            await s.left.wait()
        s.go.set()
        s.close(0, attempt=2)
        report = await s.sent()
        assert (report.ok, report.attempt) == (True, 2)


async def test_work_that_is_cancelled_before_it_began_is_not_begun() -> None:
    async with scene(0) as s:
        for attempt in range(1, 50):
            s.close(0, attempt=attempt)
            s.closer.put(AbortRound(step=1, attempt=attempt, reason="a member died"))
        s.close(0, attempt=50)
        assert (await s.sent()).attempt == 50
        assert s.worker.calls.count("prepare 1") == 1


async def test_a_lost_session_ends_the_attempt() -> None:
    async with scene(0) as s:
        s.go = trio.Event()
        s.close(0)
        await s.entered.wait()
        s.closer.session_lost()
        with trio.fail_after(5):
            await s.left.wait()
        assert not s.holding.account.closing


async def test_too_many_orders_end_the_session() -> None:
    async with scene(0) as s:
        s.go = trio.Event()
        for attempt in range(1 + MAX_QUEUED_ORDERS):
            s.close(0, attempt=attempt)
        with pytest.raises(ProtocolError, match="already wait"):
            s.close(0, attempt=1000)


async def test_the_death_of_the_held_stages_worker_is_left_to_its_tenure() -> None:
    async with scene(0) as s:
        s.worker.error = WorkerDied("killed")
        s.close(0)
        s.closer.put(SaveSnapshot(version=0, stage=0))
        await trio.testing.wait_all_tasks_blocked()
        assert s.worker.calls == ["prepare 1"]
        with pytest.raises(trio.WouldBlock):
            s._sent.receive_nowait()


async def test_a_snapshot_is_saved_or_its_failure_reported() -> None:
    async with scene(0) as s:
        s.closer.put(SaveSnapshot(version=0, stage=0))
        assert isinstance(await s.sent(), SnapshotReady)
        s.can_save = False
        s.closer.put(SaveSnapshot(version=0, stage=0))
        assert await s.sent() == SnapshotFailed(version=0, stage=0, reason="the disk is full")


async def test_a_move_is_averaged_and_applied_in_the_prepared_stages_worker() -> None:
    async with scene(0) as s:
        s.prepare()
        s.close(0, moving=True)
        assert (await s.sent()).ok
        s.apply()
        assert (await s.sent()).digest == "of stage 1"
        assert s.next.calls == [
            "prepare 1", "reduce 1, 1, own", "norm 1 of 8", "apply 1 of 8 with 2.0, 0.1",
        ]  # fmt: skip
        assert "apply" not in " ".join(s.worker.calls)
        assert s.decisions == [StepApplied(1, 1, 1), SwitchToPrepared()]


async def test_the_death_of_the_prepared_stages_worker_fails_only_the_attempt() -> None:
    async with scene(0) as s:
        s.prepare()
        s.next.error = WorkerDied("killed")
        s.close(0, moving=True)
        assert (await s.sent()).reason == "of the next stage: killed"
        s.close(0, attempt=2)
        assert (await s.sent()).ok


async def test_a_prepared_stage_that_is_given_up_fails_only_the_attempt() -> None:
    async with scene(0) as s:
        s.prepare()
        s.go = trio.Event()
        s.close(0, moving=True)
        await s.entered.wait()
        s.closer.prepared_lost()
        assert (await s.sent()).reason == "the next stage was lost"
        s.go.set()
        s.close(0, attempt=2)
        assert (await s.sent()).ok
