"""Takes, holds, moves and gives up a stage: the life of the stage worker inside the daemon.

One task per stage: start the worker, bring it to the assigned version, send Ready, serve until the
assignment ends or the worker dies. A stage that is prepared for a move is kept beside the held one
until a step is applied with it (`swarm_client.pipeline.step_close`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import trio

from swarm_client.fault_injection import faults
from swarm_client.fault_injection.faults import FaultPoint
from swarm_client.machine.home import Home
from swarm_client.membership.membership import Membership
from swarm_client.pipeline.held_stage import Holding
from swarm_client.pipeline.receipts import receipt_signer
from swarm_client.pipeline.stage_links import StageLinks
from swarm_client.pipeline.stage_server import StageServer
from swarm_client.pipeline.step_close import CloseOrder, StepCloser
from swarm_client.pipeline.uplink_share import UplinkShare
from swarm_client.stage.handle.warm_worker import WarmWorker
from swarm_client.stage.handle.worker_handle import StageWorker, open_worker
from swarm_client.stage.protocol.errors import WorkerDied
from swarm_client.volunteer.contribution import ContributionCounter
from swarm_client.volunteer.gradient_averager import GroupAverager
from swarm_client.volunteer.options import VolunteerOptions
from swarm_client.volunteer.reconnect import Attachment
from swarm_client.volunteer.snapshots import SnapshotStore
from swarm_shared.base.backoff import backoff_seconds
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import Generation, StageIndex, Version
from swarm_shared.identity.keys import Identity
from swarm_shared.network import Node
from swarm_shared.protocol import Apply, AssignStage, Ready, SaveSnapshot, SyncFailed
from swarm_shared.volunteer_rules.stage_account import StageAccount

log = logging.getLogger(__name__)

GRAPH_SHARE = 0.5
"""Fraction of the offered memory for autograd graphs in flight; the rest is the stage's."""

WORKER_BACKOFF_SECONDS = 2.0
"""Pause before a stage is asked for again after its worker died; doubled each time, up to 60 s."""


def _inject_faults(phase: FaultPoint, version: int) -> None:
    faults.inject_outage(phase, version + 1)
    faults.inject(phase, version + 1)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """How much of its device a worker may use; `threads` is at most the number it was
    started with."""

    duty_cycle: float = 1.0
    threads: int = 1024
    vram_bytes: int | None = None


@dataclass(slots=True, eq=False)
class _StageTenure:
    """One stage held by this peer, from its worker's start to its end."""

    assignment: AssignStage
    """The latest assignment; the same stage may be assigned again at another version."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    serving: trio.CancelScope | None = None
    """Scope of the work under this assignment; the worker outlives it."""
    ended: trio.Event = field(default_factory=trio.Event)
    holding: Holding | None = None
    """Set once the worker is at the assigned version."""
    nursery: trio.Nursery | None = None
    worker: StageWorker | None = None
    """Set while its process lives."""

    async def end(self) -> None:
        self.scope.cancel()
        await self.ended.wait()


class StageHost(Protocol):
    """The volunteer, as its stage manager sees it."""

    identity: Identity
    home: Home
    node: Node
    options: VolunteerOptions
    membership: Membership | None
    attachment: Attachment
    contribution: ContributionCounter
    snapshots: SnapshotStore
    averager: GroupAverager
    stage_links: StageLinks
    stage_server: StageServer
    uplink_share: UplinkShare

    @property
    def report(self) -> Callable[[str], None]: ...
    def generation(self) -> Generation: ...
    def send(self, message: FrozenModel) -> None: ...
    def claim_disk(self, size_bytes: int) -> None: ...
    def step_changed(self) -> None: ...


class StageManager:
    """The stage that the volunteer holds, if any, and the one that it prepares for a move."""

    def __init__(self, volunteer: StageHost, nursery: trio.Nursery) -> None:
        self._volunteer = volunteer
        self._nursery = nursery
        self._step_closer: StepCloser | None = None
        self._held_tenure: _StageTenure | None = None
        self._prepared_tenure: _StageTenure | None = None
        self._numbers = itertools.count(1)
        self._deaths = 0
        self._limits = WorkerLimits()
        self._spare = WarmWorker(
            volunteer.options.threads, volunteer.home.log_folder / "worker.log"
        )
        nursery.start_soon(self._spare.run)

    @property
    def holding(self) -> Holding | None:
        return self._volunteer.stage_server.holding

    @property
    def loading_stage(self) -> StageIndex | None:
        """The stage that is being loaded while none is held."""
        held = self._held_tenure
        return held.assignment.stage if held is not None and self.holding is None else None

    async def wait_ready(self) -> None:
        """Wait until a stage can be taken without delay: a joining peer holds up the step."""
        await self._spare.ready()

    async def take(self, assignment: AssignStage) -> None:
        """Start on the assignment, beside the held stage or in its place.

        The worker is reused if its stage is the same: starting another one takes seconds in which
        the run may wait.
        """
        await self._drop_prepared()
        if assignment.prepare:
            self._prepared_tenure = _StageTenure(assignment)
            self._nursery.start_soon(self._run_tenure, self._prepared_tenure)
            return
        held = self._held_tenure
        self._volunteer.snapshots.forget()
        again = held is not None and held.assignment.stage == assignment.stage
        if held is not None and held.serving is not None and again:
            held.assignment, held.holding = assignment, None
            self._volunteer.stage_server.holding = self._step_closer = None
            self._step_changed()
            held.serving.cancel()
            return
        if held is not None:
            await held.end()
            _inject_faults(FaultPoint.STAGE_MIGRATION, assignment.version)
        self._held_tenure = _StageTenure(assignment)
        self._nursery.start_soon(self._run_tenure, self._held_tenure)

    def limit(self, limits: WorkerLimits) -> None:
        """Apply the limits to all workers from now on; a busy worker applies them afterwards."""
        if limits != self._limits:
            self._limits = limits
            for tenure in filter(None, (self._held_tenure, self._prepared_tenure)):
                if tenure.worker is not None:
                    self._nursery.start_soon(self._limit, tenure.worker)

    async def _limit(self, worker: StageWorker) -> None:
        limits = self._limits
        # A dead worker is handled by its tenure; the next one is limited at its start.
        with contextlib.suppress(WorkerDied):
            await worker.limit(limits.duty_cycle, limits.threads, limits.vram_bytes)

    async def drop(self) -> None:
        """End the held and the prepared stage with their workers."""
        await self._drop_prepared()
        if self._held_tenure is not None:
            await self._held_tenure.end()

    async def _drop_prepared(self) -> None:
        if self._prepared_tenure is not None:
            await self._prepared_tenure.end()

    def put_close_order(self, message: CloseOrder) -> None:
        if self._step_closer is not None:
            self._step_closer.put(message)

    def session_lost(self) -> None:
        """Drop the prepared stage, because a coordinator that returns has no record of the move;
        keep the held one."""
        if self._prepared_tenure is not None:
            self._prepared_tenure.scope.cancel()
        if self._step_closer is not None:
            self._step_closer.session_lost()

    # ---- step closes (`swarm_client.pipeline.step_close.CloseHandler`)

    def send(self, message: FrozenModel) -> None:
        self._volunteer.send(message)

    def rejoin(self) -> None:
        self._volunteer.attachment.restart()

    def prepared(self) -> Holding | None:
        return self._prepared_tenure.holding if self._prepared_tenure is not None else None

    async def _run_tenure(self, tenure: _StageTenure) -> None:
        volunteer = self._volunteer
        died: WorkerDied | None = None
        try:
            with tenure.scope:
                died = await self._run_worker(tenure)
        except SwarmError as error:
            stage, version = tenure.assignment.stage, tenure.assignment.version
            volunteer.report(f"stage {stage} could not be loaded: {error}")
            volunteer.send(SyncFailed(stage=stage, version=version, reason=str(error)[:500]))
        finally:
            held = self._held_tenure is tenure
            if held:
                self._volunteer.stage_server.holding = None
                self._step_closer = self._held_tenure = None
                self._step_changed()
            elif self._prepared_tenure is tenure:
                self._prepared_tenure = None
            tenure.ended.set()
        if died is not None and held:
            self._deaths += 1
            pause = backoff_seconds(self._deaths - 1, WORKER_BACKOFF_SECONDS, 60.0)
            volunteer.report(f"{died}; joining again in {pause:.0f} s")
            await trio.sleep(pause)
            volunteer.attachment.restart()

    async def _run_worker(self, tenure: _StageTenure) -> WorkerDied | None:
        """Serve the assigned stage, and again when it is assigned again, until its worker dies."""
        volunteer, options = self._volunteer, self._volunteer.options
        assert volunteer.membership is not None
        async with open_worker(
            volunteer.membership.manifest,
            tenure.assignment.stage,
            options.device.name,
            options.threads,
            int(options.device.memory_bytes * GRAPH_SHARE),
            f"swarm-{volunteer.node.peer_id[-8:]}-{next(self._numbers)}",
            volunteer.home.log_folder / "worker.log",
            process=self._spare.process(),
        ) as worker:
            tenure.worker = worker
            if self._limits != WorkerLimits():
                await self._limit(worker)
            is_fresh = True
            while True:
                with trio.CancelScope() as tenure.serving:
                    return await self._serve(worker, tenure, is_fresh)
                is_fresh = False
        raise AssertionError("unreachable: the worker's context suppresses nothing")

    async def _serve(self, worker: StageWorker, tenure: _StageTenure, is_fresh: bool) -> WorkerDied:
        volunteer, assignment = self._volunteer, tenure.assignment
        where = f"stage {assignment.stage} at version {assignment.version}"
        if assignment.prepare:
            where += " beside the held one"
        volunteer.report(f"taking {where}")
        try:
            digest = await self._load_stage(worker, assignment, is_fresh)
        except WorkerDied as error:
            return error
        async with trio.open_nursery() as nursery:
            tenure.holding, tenure.nursery = self._new_holding(worker, assignment), nursery
            holding = tenure.holding
            if not assignment.prepare:
                self._install(tenure.holding, tenure)
            volunteer.send(Ready(stage=assignment.stage, version=assignment.version, digest=digest))
            volunteer.report(f"holding {where}")
            try:
                died = await worker.wait_died()
            finally:
                # Tasks of other senders' links outlive this nursery and send through it.
                if holding.next_stage is not None:
                    holding.next_stage.close()
            nursery.cancel_scope.cancel()
        return died

    async def _load_stage(
        self, worker: StageWorker, assignment: AssignStage, is_fresh: bool
    ) -> str:
        """Bring the worker to the assigned version; return the digest of the stage's parameters.

        `is_fresh`: the worker is as it was started, with parameters from the manifest's seed.
        """
        volunteer = self._volunteer
        assert volunteer.membership is not None
        if assignment.source == "fresh":
            if is_fresh:
                return worker.configured.digest
            return (await worker.reinitialise(assignment.version)).digest
        volunteer.claim_disk(assignment.bytes)
        path = await volunteer.snapshots.fetch(
            volunteer.node, assignment, volunteer.membership.certificate,
            volunteer.membership.run,
            lambda _done, _all: _inject_faults(FaultPoint.STATE_DOWNLOAD, assignment.version),
        )  # fmt: skip
        volunteer.report(
            f"downloaded {assignment.bytes / 1e6:.1f} MB of state from "
            f"{len(assignment.holders)} peer(s)"
        )
        faults.corrupt_file(FaultPoint.STATE_DOWNLOAD, assignment.version + 1, path)
        try:
            return (await worker.load_state(path, assignment.version)).digest
        finally:
            path.unlink(missing_ok=True)

    def _new_holding(self, worker: StageWorker, assignment: AssignStage) -> Holding:
        volunteer = self._volunteer
        assert volunteer.membership is not None
        stage, manifest = assignment.stage, volunteer.membership.manifest
        sign = receipt_signer(
            volunteer.identity, volunteer.membership.run, stage,
            manifest.training.sequences_per_microbatch, volunteer.generation,
        )  # fmt: skip
        account = StageAccount(
            stage, Version(assignment.version), manifest.training.staleness, sign
        )
        return Holding(worker, account, None)

    def _install(self, holding: Holding, tenure: _StageTenure) -> None:
        """Make this the held stage; its step closer lives as long as the tenure's serving."""
        volunteer = self._volunteer
        assert volunteer.membership is not None
        assert tenure.nursery is not None
        if holding.stage < volunteer.membership.manifest.stage_count - 1:
            holding.next_stage = volunteer.stage_links.downstream(
                StageIndex(holding.stage + 1), tenure.nursery
            )
        volunteer.stage_server.holding = holding
        self._step_changed()
        self._step_closer = StepCloser(
            holding, volunteer.membership.manifest, volunteer.averager, self
        )
        tenure.nursery.start_soon(self._run_step_closer, self._step_closer)

    def _step_changed(self) -> None:
        """What is in flight of an older step is not wanted any more."""
        holding = self.holding
        if holding is not None and holding.next_stage is not None:
            holding.next_stage.oldest_step_is(holding.step)
        self._volunteer.step_changed()

    def switch_to_prepared(self, prepared: Holding) -> None:
        """Make the prepared stage the held one; end the stage that was held, with its worker."""
        left, tenure = self._held_tenure, self._prepared_tenure
        assert left is not None
        assert tenure is not None
        assert tenure.holding is prepared
        _inject_faults(FaultPoint.STAGE_MIGRATION, prepared.version)
        self._held_tenure, self._prepared_tenure = tenure, None
        # Snapshots of the stage that is left stay served: other peers may be fetching them.
        self._install(prepared, tenure)
        self._volunteer.report(f"moved to stage {prepared.stage}")
        left.scope.cancel()

    def drop_outdated(self) -> None:
        """Drop the prepared stage: it is one version behind, and the coordinator assigns it
        again."""
        if self._prepared_tenure is not None:
            self._prepared_tenure.scope.cancel()

    async def _run_step_closer(self, closer: StepCloser) -> None:
        try:
            await closer.run()
        except WorkerDied:
            return  # `_run_worker` waits for the same death and reports it

    async def save_snapshot(self, holding: Holding, request: SaveSnapshot) -> None:
        await self._volunteer.snapshots.save(holding, request, self._volunteer.send)

    def step_applied(self, holding: Holding, apply: Apply, counted: int) -> None:
        volunteer = self._volunteer
        assert volunteer.membership is not None
        self._deaths = 0
        self._step_changed()
        volunteer.uplink_share.step_applied()
        manifest = volunteer.membership.manifest
        volunteer.contribution.add_step(
            apply.step, counted, manifest.tokens_per_microbatch, manifest.work_share(holding.stage)
        )
        volunteer.report(
            f"step {apply.step} applied: stage {holding.stage}, {counted} microbatches here"
        )
