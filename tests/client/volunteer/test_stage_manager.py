"""Tenures of stages in the daemon: a worker is started, loaded, served and ended as the rules say.

Workers, downloads and the coordinator are replaced by ones that record what is asked of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from kits.client.held_stage import count
from kits.transcripts import TRANSCRIPT
from swarm_client.control.contribution_log import ContributionCounter, ContributionLog
from swarm_client.pipeline.held_stage import Holding, LoadedStage
from swarm_client.stage.protocol.errors import RequestFailed, WorkerDied
from swarm_client.stage.protocol.messages import SetLimits
from swarm_client.volunteer.context import WorkerLimits
from swarm_client.volunteer.memory_shortage import MemoryShortage
from swarm_client.volunteer.stage_manager import StageManager
from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.types import MAX_MICROBATCHES
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import (
    AssignStage,
    Close,
    Drop,
    Dropped,
    Ready,
    Reduction,
    SaveSnapshot,
    SnapshotReady,
    SyncFailed,
)
from swarm_shared.volunteer_rules import step_close
from swarm_shared.volunteer_rules.stage_account import StageAccount

STAGES = 3


class Worker:
    """A stage worker until it is killed."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.loads: list[int] = []
        self.limits: list[tuple[float, int]] = []
        """Duty cycles with bytes for graphs."""
        self.died = trio.Event()
        self.closed = False
        self.averages = 0
        self.uncommits: bool | Exception = True
        """Answer to the next removals."""
        self.resets = 0
        self.configured = SimpleNamespace(arithmetic="1234", streamed_bytes=0)

    async def uncommit(self, step: int, microbatches: tuple[int, ...]) -> bool:
        await trio.lowlevel.checkpoint()
        if isinstance(self.uncommits, Exception):
            raise self.uncommits
        return self.uncommits

    async def reset_accumulator(self, step: int) -> None:
        await trio.lowlevel.checkpoint()
        self.resets += 1

    async def wait_died(self) -> WorkerDied:
        await self.died.wait()
        return WorkerDied("the compute process was killed")

    async def prepare_round(self, step: int) -> None:
        self.averages += 1
        await trio.sleep_forever()

    async def limit(self, limits: SetLimits) -> None:
        self.limits.append((limits.duty_cycle, limits.graph_bytes))


class Scene:
    """In the place of the loader, the pipeline, the coordinator, the averager and the snapshots."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.workers: list[Worker] = []
        self.ending = trio.Event()
        """Workers end when it is set."""
        self.ending.set()
        self.error: Exception | None = None
        """Raised by the next load."""
        self.loading: trio.Event | None = None
        """Loads wait for it."""
        self.offered_bytes = 100
        """Of which every stage takes 10."""
        self.sent: list[object] = []
        self.lines: list[str] = []
        self.holding: Holding | None = None
        self.restarted = trio.Event()
        self.forgotten = self.applied = 0
        self.saved: list[int] = []
        self.links = self
        context: Any = SimpleNamespace(
            report=self.lines.append, nursery=nursery,
            options=SimpleNamespace(shortage=MemoryShortage(), limits=WorkerLimits()),
            contribution=ContributionCounter(ContributionLog()),
            identity=Identity.from_seed(b"m" * 32),
        )  # fmt: skip
        self.contribution = context.contribution
        self.options = context.options
        self.shortage = context.options.shortage
        manifest = SimpleNamespace(
            stage_count=STAGES, tokens_per_step=8, tokens_per_microbatch=4,
            work_share=lambda stage: 0.5,
        )  # fmt: skip
        membership: Any = SimpleNamespace(now=SimpleNamespace(manifest=manifest))
        me: Any = self
        self.manager = StageManager(context, membership, me, me, me, me, me)

    # ---- the loader

    @asynccontextmanager
    async def open_worker(self, stage: int) -> AsyncIterator[Worker]:
        worker = Worker(stage)
        self.workers.append(worker)
        await trio.lowlevel.checkpoint()
        try:
            yield worker
        finally:
            with trio.CancelScope(shield=True):
                await self.ending.wait()
            worker.closed = True

    async def load(self, worker: Worker, assignment: AssignStage, *, is_fresh: bool) -> str:
        if self.loading is not None:
            await self.loading.wait()
        if self.error is not None:
            raise self.error
        worker.loads.append(assignment.version)
        assert is_fresh == (len(worker.loads) == 1)
        return f"{assignment.stage} at {assignment.version}"

    def graph_bytes(self, stage: int) -> int:
        return max(0, self.offered_bytes - 10)

    def host_graph_bytes(self, stage: int) -> int:
        return 0

    def missing_memory(self, stage: int, worker: Worker) -> str:
        return "" if self.offered_bytes >= 10 else f"{self.offered_bytes} bytes are too few"

    def loaded_stage(self, worker: Any, version: Any) -> LoadedStage:
        return LoadedStage(worker, StageAccount(worker.stage, version, 0, str))

    # ---- the pipeline

    def downstream(self, stage: int, nursery: trio.Nursery) -> Any:
        nursery.start_soon(trio.sleep_forever)
        return SimpleNamespace(stage=stage)

    def hold(self, holding: Holding | None) -> None:
        self.holding = holding

    def step_applied(self) -> None:
        self.applied += 1

    # ---- the coordinator and the snapshots

    def send(self, message: object) -> bool:
        self.sent.append(message)
        return True

    def restart(self) -> None:
        self.restarted.set()

    def forget(self) -> None:
        self.forgotten += 1

    async def save(self, holding: Holding, request: SaveSnapshot) -> SnapshotReady:
        self.saved.append(holding.stage)
        return SnapshotReady(version=0, stage=0, item="a", bytes=1, sha256="0" * 64)

    # ---- what a test does

    async def assign(self, stage: int, version: int = 0, *, prepare: bool = False) -> None:
        self.manager.take(
            AssignStage(stage=stage, version=version, source="fresh", prepare=prepare)
        )
        await self.settle()

    async def settle(self) -> None:
        await trio.testing.wait_all_tasks_blocked()

    @property
    def account(self) -> StageAccount:
        """That of the stage that is held."""
        assert self.holding is not None
        return self.holding.account

    @property
    def held(self) -> tuple[int, int] | None:
        return None if self.holding is None else (self.holding.stage, self.holding.version)


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    async with trio.open_nursery() as nursery:
        yield Scene(nursery)
        nursery.cancel_scope.cancel()


def ready(stage: int, version: int = 0) -> Ready:
    return Ready(stage=stage, version=version, digest=f"{stage} at {version}")


async def test_an_assigned_stage_is_loaded_served_and_ready() -> None:
    async with scene() as s:
        s.loading = trio.Event()
        await s.assign(1, 4)
        assert (s.held, s.manager.loading_stage) == (None, 1)
        s.loading.set()
        await s.settle()
        assert (s.held, s.manager.loading_stage) == ((1, 4), None)
        assert s.sent == [ready(1, 4)]
        assert s.holding is not None
        assert s.holding.next_stage is not None
        assert s.holding.next_stage.stage == 2


async def test_a_stage_that_the_run_does_not_have_is_no_assignment() -> None:
    async with scene() as s:
        with pytest.raises(ProtocolError, match=f"assigned stage {STAGES}, and the run has"):
            await s.assign(STAGES)
        await s.settle()
        assert s.workers == []


async def test_the_last_stage_sends_nothing_on() -> None:
    async with scene() as s:
        await s.assign(STAGES - 1)
        assert s.holding is not None
        assert s.holding.next_stage is None


async def test_another_stage_gets_a_worker_once_the_one_before_has_ended() -> None:
    async with scene() as s:
        await s.assign(0)
        s.ending = trio.Event()
        await s.assign(1)
        assert len(s.workers) == 1
        s.ending.set()
        await s.settle()
        assert [worker.closed for worker in s.workers] == [True, False]
        assert s.held == (1, 0)


async def test_the_same_stage_keeps_its_worker_and_gets_a_new_account() -> None:
    async with scene() as s:
        await s.assign(0)
        before = s.holding
        s.manager.take(AssignStage(stage=0, version=7, source="fresh"))
        assert s.holding is None, "at once: what is served is of the old version"
        await s.settle()
        assert [worker.loads for worker in s.workers] == [[0, 7]]
        assert (s.held, s.forgotten) == ((0, 7), 2)
        assert s.holding is not before
        assert s.sent == [ready(0), ready(0, 7)]


async def test_a_stage_that_cannot_be_loaded_is_reported_and_its_worker_ends() -> None:
    async with scene() as s:
        s.error = RequestFailed("storage", "the file is damaged")
        await s.assign(0, 3)
        assert s.sent == [SyncFailed(stage=0, version=3, reason="the file is damaged")]
        assert s.workers[0].closed
        assert "stage 0 could not be loaded: the file is damaged" in s.lines


def test_after_the_death_of_its_worker_the_volunteer_attaches_again() -> None:
    async def main() -> None:
        async with scene() as s:
            for pause in (2, 4, 8):
                await s.assign(0)
                began = trio.current_time()
                s.workers[-1].died.set()
                await s.restarted.wait()
                assert trio.current_time() - began == pytest.approx(pause)
                assert f"the compute process was killed; joining again in {pause} s" in s.lines
                assert s.held is None
                s.restarted = trio.Event()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_a_prepared_stage_is_served_from_the_switch_on_and_the_old_one_ends() -> None:
    async with scene() as s:
        await s.assign(0)
        await s.assign(1, prepare=True)
        assert (s.held, len(s.workers)) == ((0, 0), 2)
        s.manager.close_decided(step_close.StepApplied(1, 1, 3))
        s.manager.close_decided(step_close.SwitchToPrepared())
        assert s.held == (1, 0)
        await s.settle()
        assert [worker.closed for worker in s.workers] == [True, False]
        assert "step 1 applied: stage 1, 3 microbatches here" in s.lines
        assert (s.contribution.log.microbatches, s.applied) == (3, 1)


async def test_a_prepared_stage_that_is_outdated_ends_alone() -> None:
    async with scene() as s:
        await s.assign(0)
        await s.assign(1, prepare=True)
        s.manager.close_decided(step_close.DropPrepared())
        await s.settle()
        assert [worker.closed for worker in s.workers] == [False, True]
        assert s.held == (0, 0)


async def test_a_prepared_worker_that_dies_at_the_switch_is_not_served() -> None:
    async with scene() as s:
        s.ending = trio.Event()
        await s.assign(0)
        await s.assign(1, prepare=True)
        s.workers[1].died.set()
        await s.settle()  # its tenure waits for its end
        s.manager.close_decided(step_close.SwitchToPrepared())
        assert s.held is None
        s.ending.set()
        with trio.fail_after(10):
            await s.restarted.wait()


async def test_orders_of_a_step_close_are_those_of_the_held_stage() -> None:
    async with scene() as s:
        s.manager.put_close_order(SaveSnapshot(version=0, stage=0))
        await s.assign(0)
        await s.assign(1, prepare=True)
        s.manager.put_close_order(SaveSnapshot(version=0, stage=0))
        await s.settle()
        assert s.saved == [0]
        assert isinstance(s.sent[-1], SnapshotReady)


def signed(account: StageAccount, *microbatches: int) -> None:
    for microbatch in microbatches:
        count(account, 1, microbatch)


async def test_dropped_microbatches_lose_their_receipts_before_the_answer() -> None:
    async with scene() as s:
        await s.assign(0)
        signed(s.account, 3, 4)
        s.manager.drop_microbatches(Drop(step=1, stage=0, microbatches=(3,)))
        assert s.account.receipt(1, 3) is None
        assert not any(isinstance(one, Dropped) for one in s.sent)
        await s.settle()
        assert s.sent[-1] == Dropped(step=1, stage=0, microbatches=(3,))
        assert s.account.count(1) == 1
        assert s.workers[0].resets == 0


@pytest.mark.parametrize("answer", [False, RequestFailed("out_of_memory", "the memory is full")])
async def test_what_cannot_be_taken_out_empties_the_accumulator(answer: bool | Exception) -> None:
    async with scene() as s:
        await s.assign(0)
        signed(s.account, 3, 4)
        s.workers[0].uncommits = answer
        s.manager.drop_microbatches(Drop(step=1, stage=0, microbatches=(3,)))
        await s.settle()
        assert s.workers[0].resets == 1
        assert s.account.count(1) == 0
        assert isinstance(s.sent[-1], Dropped)


async def test_a_computation_from_before_the_removal_ended_signs_nothing() -> None:
    async with scene() as s:
        await s.assign(0)
        account = s.account
        s.manager.drop_microbatches(Drop(step=1, stage=0, microbatches=(3,)))
        computation = account.begin(1, 3, (0,))
        await s.settle()
        signed_now = account.finish(
            computation, added=False, tokens=4, loss_sum=None, transcript=TRANSCRIPT
        )
        assert signed_now is None


async def test_orders_to_take_out_do_not_fill_the_memory() -> None:
    async with scene() as s:
        await s.assign(0)
        every = Drop(step=1, stage=0, microbatches=tuple(range(MAX_MICROBATCHES)))
        s.manager.drop_microbatches(every)
        with pytest.raises(ProtocolError, match="already wait"):
            s.manager.drop_microbatches(every)
        await s.settle()
        s.manager.drop_microbatches(every)  # the first one is carried out


async def test_a_drop_of_a_stage_that_is_not_held_is_answered_at_once() -> None:
    async with scene() as s:
        await s.assign(0)
        s.manager.drop_microbatches(Drop(step=1, stage=2, microbatches=(3,)))
        assert s.sent[-1] == Dropped(step=1, stage=2, microbatches=(3,))


async def test_a_lost_session_drops_the_prepared_stage_and_reopens_the_step() -> None:
    async with scene() as s:
        await s.assign(0)
        await s.assign(1, prepare=True)
        part = Reduction(part="own", members=("a peer",))
        order = Close(step=1, attempt=1, committed=(), reductions=(part,), moving=(part,))
        s.manager.put_close_order(order)
        await s.settle()
        assert s.account.closing
        s.manager.session_lost()
        await s.settle()
        assert not s.account.closing
        assert [worker.closed for worker in s.workers] == [False, True]
        await s.assign(1, prepare=True)
        s.manager.put_close_order(order)
        await s.settle()
        assert [worker.averages for worker in s.workers] == [2, 1, 1]


async def test_dropping_everything_waits_for_the_ends_of_the_workers() -> None:
    async with scene() as s:
        await s.assign(0)
        await s.assign(1, prepare=True)
        await s.manager.drop()
        assert [worker.closed for worker in s.workers] == [True, True]
        assert s.held is None


async def test_limits_reach_workers_that_live_and_those_that_start() -> None:
    async with scene() as s:
        await s.assign(0)
        s.options.limits = WorkerLimits(duty_cycle=0.5)
        s.manager.limits_changed()
        await s.assign(1, prepare=True)
        assert [worker.limits for worker in s.workers] == [[(1.0, 90), (0.5, 90)], [(0.5, 90)]]


async def test_workers_keep_to_an_offer_that_falls_until_the_held_stage_does_not_fit() -> None:
    async with scene() as s:
        await s.assign(0)
        await s.assign(1, prepare=True)
        s.offered_bytes = 10
        s.manager.offer_changed()
        await trio.testing.wait_all_tasks_blocked()
        assert [worker.limits for worker in s.workers] == [[(1.0, 90), (1.0, 0)]] * 2
        assert not any("handed over" in line for line in s.lines)
        s.offered_bytes = 9
        with trio.fail_after(1):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(s.shortage.wait_begun)
                await trio.testing.wait_all_tasks_blocked()
                s.manager.offer_changed()
        assert s.lines[-1] == "stage 0 is handed over: 9 bytes are too few"


async def test_a_stage_that_no_longer_fits_when_it_is_loaded_is_handed_over() -> None:
    async with scene() as s:
        s.offered_bytes = 9
        await s.assign(0)
        assert "stage 0 is handed over: 9 bytes are too few" in s.lines
