"""Taking, holding and giving up a stage: the worker's life inside the daemon.

One task per stage: start the worker, bring it to the assigned version, say Ready, serve until the
assignment ends or the worker dies. A stage that is only prepared waits beside the one that is held
until a step is applied with it (`moving_rounds`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from swarm_client.fault_injection import faults
from swarm_client.fault_injection.faults import Phase
from swarm_client.pipeline.downstream import Downstream
from swarm_client.pipeline.held_stage import Holding
from swarm_client.pipeline.receipts import ReceiptBook
from swarm_client.pipeline.stage_move import MovingRounds
from swarm_client.pipeline.step_close import RoundMessage, Rounds
from swarm_client.stage.handle.warm_worker import SpareWorker
from swarm_client.stage.handle.worker_handle import StageWorker, open_worker
from swarm_client.stage.protocol.errors import WorkerDied
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.types import StageIndex, Version
from swarm_shared.protocol import Apply, AssignStage, Ready, SaveSnapshot, SyncFailed

if TYPE_CHECKING:
    from swarm_client.volunteer.volunteer import Volunteer

log = logging.getLogger(__name__)

GRAPH_SHARE = 0.5
"""Share of the offered memory that autograd graphs in flight may take; the rest is the stage's."""

WORKER_BACKOFF_SECONDS = 2.0
"""Pause before a stage is asked for again after its worker died, doubled each time up to 60 s."""


def _strike(phase: Phase, version: int) -> None:
    faults.cut(phase, version + 1)
    faults.strike(phase, version + 1)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """How much of its device a worker may use; the threads are at most those it was started
    with."""

    duty_cycle: float = 1.0
    threads: int = 1024
    vram_bytes: int | None = None


@dataclass(slots=True, eq=False)
class _Stay:
    """One stage's life here: from its worker's start to its end."""

    assignment: AssignStage
    """The latest one; the same stage may be assigned anew, at another version."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    serving: trio.CancelScope | None = None
    """Of what is done by this assignment; the worker outlives it."""
    ended: trio.Event = field(default_factory=trio.Event)
    holding: Holding | None = None
    """When its worker is at the assigned version."""
    nursery: trio.Nursery | None = None
    next_stage: Downstream | None = None
    worker: StageWorker | None = None
    """While its process lives."""

    async def end(self) -> None:
        self.scope.cancel()
        await self.ended.wait()


class Holder:
    """What the volunteer holds, if anything, and what it prepares to hold beside that."""

    def __init__(self, volunteer: Volunteer, nursery: trio.Nursery) -> None:
        self.holding: Holding | None = None
        self.next_stage: Downstream | None = None
        self._volunteer = volunteer
        self._nursery = nursery
        self._rounds: Rounds | None = None
        self._held: _Stay | None = None
        self._beside: _Stay | None = None
        self._numbers = itertools.count(1)
        self._deaths = 0
        self._limits = WorkerLimits()
        self._spare = SpareWorker(
            volunteer.options.threads, volunteer.home.log_folder / "worker.log"
        )
        nursery.start_soon(self._spare.run)

    @property
    def getting(self) -> StageIndex | None:
        """The stage that is brought up while none is held."""
        held = self._held
        return held.assignment.stage if held is not None and self.holding is None else None

    async def ready_to_take(self) -> None:
        """Wait until a stage could be taken without delay: a newcomer holds up the others."""
        await self._spare.ready()

    async def take(self, assignment: AssignStage) -> None:
        """Start on the assignment: beside what is held, or in its place; with the same worker, if
        its stage is the same: starting another one takes seconds, in which the run may wait."""
        await self._drop_prepared()
        if assignment.prepare:
            self._beside = _Stay(assignment)
            self._nursery.start_soon(self._hold, self._beside)
            return
        held = self._held
        self._volunteer.snapshots.forget()
        again = held is not None and held.assignment.stage == assignment.stage
        if held is not None and held.serving is not None and again:
            held.assignment, held.holding = assignment, None
            self.holding = self.next_stage = self._rounds = None
            held.serving.cancel()
            return
        if held is not None:
            await held.end()
            _strike(Phase.STAGE_MIGRATION, assignment.version)
        self._held = _Stay(assignment)
        self._nursery.start_soon(self._hold, self._held)

    def limit(self, limits: WorkerLimits) -> None:
        """From now on, for every worker; one in the middle of something hears of it after that."""
        if limits != self._limits:
            self._limits = limits
            for stay in filter(None, (self._held, self._beside)):
                if stay.worker is not None:
                    self._nursery.start_soon(self._limit, stay.worker)

    async def _limit(self, worker: StageWorker) -> None:
        limits = self._limits
        # A worker that has died is its stay's business; the next one is limited at its start.
        with contextlib.suppress(WorkerDied):
            await worker.limit(limits.duty_cycle, limits.threads, limits.vram_bytes)

    async def drop(self) -> None:
        """End what is held and what is prepared, their workers included."""
        await self._drop_prepared()
        if self._held is not None:
            await self._held.end()

    async def _drop_prepared(self) -> None:
        if self._beside is not None:
            await self._beside.end()

    def round_message(self, message: RoundMessage) -> None:
        if self._rounds is not None:
            self._rounds.put(message)

    def session_lost(self) -> None:
        """The coordinator that comes back knows of no move; what is held stays."""
        if self._beside is not None:
            self._beside.scope.cancel()
        if self._rounds is not None:
            self._rounds.session_lost()

    def prepared(self) -> Holding | None:
        return self._beside.holding if self._beside is not None else None

    async def _hold(self, stay: _Stay) -> None:
        volunteer = self._volunteer
        died: WorkerDied | None = None
        try:
            with stay.scope:
                died = await self._live(stay)
        except SwarmError as error:
            stage, version = stay.assignment.stage, stay.assignment.version
            volunteer.report(f"stage {stage} cannot be held: {error}")
            volunteer.send(SyncFailed(stage=stage, version=version, reason=str(error)[:500]))
        finally:
            held = self._held is stay
            if held:
                self.holding = self.next_stage = self._rounds = self._held = None
            elif self._beside is stay:
                self._beside = None
            stay.ended.set()
        if died is not None and held:
            self._deaths += 1
            pause = min(60.0, WORKER_BACKOFF_SECONDS * 2 ** (self._deaths - 1))
            volunteer.report(f"{died}; joining again in {pause:.0f} s")
            await trio.sleep(pause)
            volunteer.attachment.restart()

    async def _live(self, stay: _Stay) -> WorkerDied | None:
        """Hold the assigned stage, and again when it is assigned anew, until its worker dies."""
        volunteer, options = self._volunteer, self._volunteer.options
        assert volunteer.membership is not None
        async with open_worker(
            volunteer.membership.manifest,
            stay.assignment.stage,
            options.device.name,
            options.threads,
            int(options.device.memory_bytes * GRAPH_SHARE),
            f"swarm-{volunteer.node.peer_id[-8:]}-{next(self._numbers)}",
            volunteer.home.log_folder / "worker.log",
            process=self._spare.process(),
        ) as worker:
            stay.worker = worker
            if self._limits != WorkerLimits():
                await self._limit(worker)
            untouched = True
            while True:
                with trio.CancelScope() as stay.serving:
                    return await self._serve(worker, stay, untouched)
                untouched = False
        raise AssertionError("unreachable: the worker's context swallows nothing")

    async def _serve(self, worker: StageWorker, stay: _Stay, untouched: bool) -> WorkerDied:
        volunteer, assignment = self._volunteer, stay.assignment
        where = f"stage {assignment.stage} at version {assignment.version}"
        if assignment.prepare:
            where += " beside the one that is held"
        volunteer.report(f"taking {where}")
        try:
            digest = await self._bring_up(worker, assignment, untouched)
        except WorkerDied as error:
            return error
        async with trio.open_nursery() as nursery:
            stay.holding, stay.nursery = self._new_holding(worker, assignment), nursery
            if not assignment.prepare:
                self._install(stay.holding, stay)
            volunteer.send(Ready(stage=assignment.stage, version=assignment.version, digest=digest))
            volunteer.report(f"holding {where}")
            try:
                died = await worker.wait_died()
            finally:
                # Tasks of others' links, which outlive this nursery, send through it.
                if stay.next_stage is not None:
                    stay.next_stage.close()
            nursery.cancel_scope.cancel()
        return died

    async def _bring_up(self, worker: StageWorker, assignment: AssignStage, untouched: bool) -> str:
        """The digest of the stage's parameters at the assigned version.

        `untouched`: the worker is as it began, with parameters from the manifest's seed.
        """
        volunteer = self._volunteer
        assert volunteer.membership is not None
        if assignment.source == "fresh":
            if untouched:
                return worker.configured.digest
            return (await worker.adopt_fresh(assignment.version)).digest
        volunteer.claim_disk(assignment.bytes)
        path = await volunteer.snapshots.fetch(
            volunteer.node, assignment, volunteer.membership.certificate,
            volunteer.membership.run,
            lambda _done, _all: _strike(Phase.STATE_DOWNLOAD, assignment.version),
        )  # fmt: skip
        volunteer.report(
            f"downloaded {assignment.bytes / 1e6:.1f} MB of state from "
            f"{len(assignment.holders)} peer(s)"
        )
        faults.spoil_file(Phase.STATE_DOWNLOAD, assignment.version + 1, path)
        try:
            return (await worker.load_state(path, assignment.version)).digest
        finally:
            path.unlink(missing_ok=True)

    def _new_holding(self, worker: StageWorker, assignment: AssignStage) -> Holding:
        volunteer = self._volunteer
        assert volunteer.membership is not None
        stage = assignment.stage
        last = stage == volunteer.membership.manifest.stage_count - 1
        book = ReceiptBook(
            volunteer.identity, volunteer.membership.run, stage, volunteer.generation
        )
        return Holding(
            stage, worker, Version(assignment.version), book, last,
            staleness=volunteer.membership.manifest.training.staleness,
        )  # fmt: skip

    def _install(self, holding: Holding, stay: _Stay) -> None:
        """From now on this is what is held; its rounds live as long as its serving."""
        volunteer = self._volunteer
        assert volunteer.membership is not None
        assert stay.nursery is not None
        self.holding, self.next_stage = holding, None
        if not holding.is_last:
            self.next_stage = volunteer.stage_links.downstream(
                StageIndex(holding.stage + 1), stay.nursery
            )
        stay.next_stage = self.next_stage
        self._rounds = MovingRounds(
            holding, volunteer.membership.manifest, volunteer.averager, volunteer.send,
            self._save_snapshot, self._applied, volunteer.attachment.restart, self.prepared,
            self._switch, self._outdated,
        )  # fmt: skip
        stay.nursery.start_soon(self._run_rounds, self._rounds)

    def _switch(self, prepared: Holding) -> None:
        """What was prepared is held from now on; what was held ends, its worker included."""
        left, stay = self._held, self._beside
        assert left is not None
        assert stay is not None
        assert stay.holding is prepared
        _strike(Phase.STAGE_MIGRATION, prepared.version)
        self._held, self._beside = stay, None
        # What was saved of the stage that is left is served on: others may be fetching it.
        self._install(prepared, stay)
        self._volunteer.report(f"moved to stage {prepared.stage}")
        left.scope.cancel()

    def _outdated(self) -> None:
        """What is prepared is of the version before; the coordinator says where to get the next."""
        if self._beside is not None:
            self._beside.scope.cancel()

    async def _run_rounds(self, rounds: Rounds) -> None:
        try:
            await rounds.run()
        except WorkerDied:
            return  # `_live` waits for the same death and reports it

    async def _save_snapshot(self, holding: Holding, request: SaveSnapshot) -> None:
        await self._volunteer.snapshots.save(holding, request, self._volunteer.send)

    def _applied(self, holding: Holding, apply: Apply, counted: int) -> None:
        volunteer = self._volunteer
        assert volunteer.membership is not None
        self._deaths = 0
        volunteer.line_share.step_applied()
        manifest = volunteer.membership.manifest
        volunteer.contribution.add_step(
            apply.step, counted, manifest.tokens_per_microbatch, manifest.work_share(holding.stage)
        )
        volunteer.report(
            f"step {apply.step} applied: stage {holding.stage}, {counted} microbatches of it here"
        )
