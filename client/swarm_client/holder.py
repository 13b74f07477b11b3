"""Taking, holding and giving up a stage: the worker's life inside the daemon.

One task per assignment: start the worker, bring it to the assigned version, say Ready, serve
until the assignment ends or the worker dies.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING

import trio

from swarm_client import faults
from swarm_client.engine.downstream import Downstream
from swarm_client.engine.holding import Holding
from swarm_client.engine.receipts import ReceiptBook
from swarm_client.engine.rounds import RoundMessage, Rounds
from swarm_client.faults import Phase
from swarm_client.worker.client import StageWorker, open_worker
from swarm_client.worker.errors import WorkerDied
from swarm_client.worker.spare import SpareWorker
from swarm_shared.errors import SwarmError
from swarm_shared.messages import Apply, AssignStage, Ready, SaveSnapshot, SyncFailed
from swarm_shared.types import StageIndex, Version

if TYPE_CHECKING:
    from swarm_client.volunteer import Volunteer

log = logging.getLogger(__name__)

GRAPH_SHARE = 0.5
"""Share of the offered memory that autograd graphs in flight may take; the rest is the stage's."""

WORKER_BACKOFF_SECONDS = 2.0
"""Pause before a stage is asked for again after its worker died, doubled each time up to 60 s."""


def _strike_download(assignment: AssignStage) -> None:
    faults.cut(Phase.STATE_DOWNLOAD, assignment.version + 1)
    faults.strike(Phase.STATE_DOWNLOAD, assignment.version + 1)


class Holder:
    """What the volunteer holds, if anything."""

    def __init__(self, volunteer: Volunteer, nursery: trio.Nursery) -> None:
        self.holding: Holding | None = None
        self.next_stage: Downstream | None = None
        self._volunteer = volunteer
        self._nursery = nursery
        self._rounds: Rounds | None = None
        self._assignment: AssignStage | None = None
        self._serving: trio.CancelScope | None = None
        """Of what is held by this assignment; the worker outlives it."""
        self._scope: trio.CancelScope | None = None
        self._ended: trio.Event | None = None
        self._numbers = itertools.count(1)
        self._deaths = 0
        self._spare = SpareWorker(
            volunteer.options.threads, volunteer.home.log_folder / "worker.log"
        )
        nursery.start_soon(self._spare.run)

    async def ready_to_take(self) -> None:
        """Wait until a stage could be taken without delay: a newcomer holds up the others."""
        await self._spare.ready()

    async def take(self, assignment: AssignStage) -> None:
        """Give up what is held and start on the assignment; with the same worker, if its stage is
        the same: starting another one takes seconds, in which the run may have to wait."""
        held = self._assignment
        if self._serving is not None and held is not None and held.stage == assignment.stage:
            self._volunteer.snapshots.forget()
            self._assignment = assignment
            self.holding = self.next_stage = self._rounds = None
            self._serving.cancel()
            return
        await self.drop()
        if held is not None:
            faults.cut(Phase.STAGE_MIGRATION, assignment.version + 1)
            faults.strike(Phase.STAGE_MIGRATION, assignment.version + 1)
        self._volunteer.snapshots.forget()
        self._assignment = assignment
        self._scope, self._ended = trio.CancelScope(), trio.Event()
        self._nursery.start_soon(self._hold, self._scope, self._ended)

    async def drop(self) -> None:
        """End what is held, its worker included."""
        if self._scope is not None and self._ended is not None:
            self._scope.cancel()
            await self._ended.wait()

    def round_message(self, message: RoundMessage) -> None:
        if self._rounds is not None:
            self._rounds.put(message)

    def session_lost(self) -> None:
        if self._rounds is not None:
            self._rounds.session_lost()

    async def _hold(self, scope: trio.CancelScope, ended: trio.Event) -> None:
        volunteer = self._volunteer
        died: WorkerDied | None = None
        try:
            with scope:
                died = await self._live()
        except SwarmError as error:
            assert self._assignment is not None
            stage, version = self._assignment.stage, self._assignment.version
            volunteer.report(f"stage {stage} cannot be held: {error}")
            volunteer.send(SyncFailed(stage=stage, version=version, reason=str(error)[:500]))
        finally:
            self.holding = self.next_stage = self._rounds = None
            self._scope = self._ended = self._serving = self._assignment = None
            ended.set()
        if died is not None:
            self._deaths += 1
            pause = min(60.0, WORKER_BACKOFF_SECONDS * 2 ** (self._deaths - 1))
            volunteer.report(f"{died}; joining again in {pause:.0f} s")
            await trio.sleep(pause)
            volunteer.restart_session()

    async def _live(self) -> WorkerDied | None:
        """Hold the assigned stage, and again when it is assigned anew, until its worker dies."""
        volunteer, options = self._volunteer, self._volunteer.options
        assert volunteer.membership is not None
        assert self._assignment is not None
        async with open_worker(
            volunteer.membership.manifest,
            self._assignment.stage,
            options.device.name,
            options.threads,
            int(options.device.memory_bytes * GRAPH_SHARE),
            f"swarm-{volunteer.node.peer_id[-8:]}-{next(self._numbers)}",
            volunteer.home.log_folder / "worker.log",
            process=self._spare.process(),
        ) as worker:
            untouched = True
            while True:
                assignment = self._assignment
                assert assignment is not None
                with trio.CancelScope() as self._serving:
                    return await self._serve(worker, assignment, untouched)
                untouched = False
        raise AssertionError("unreachable: the worker's context swallows nothing")

    async def _serve(
        self, worker: StageWorker, assignment: AssignStage, untouched: bool
    ) -> WorkerDied:
        volunteer, stage = self._volunteer, assignment.stage
        volunteer.report(f"taking stage {stage} at version {assignment.version}")
        try:
            digest = await self._bring_up(worker, assignment, untouched)
        except WorkerDied as error:
            return error
        async with trio.open_nursery() as nursery:
            next_stage = self._install(worker, assignment, nursery)
            volunteer.send(Ready(stage=stage, version=assignment.version, digest=digest))
            volunteer.report(f"holding stage {stage} at version {assignment.version}")
            try:
                died = await worker.wait_died()
            finally:
                # Tasks of others' links, which outlive this nursery, send through it.
                if next_stage is not None:
                    next_stage.close()
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
        path = await volunteer.snapshots.fetch(
            volunteer.node, assignment, volunteer.membership.certificate,
            volunteer.membership.run, lambda _done, _all: _strike_download(assignment),
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

    def _install(
        self, worker: StageWorker, assignment: AssignStage, nursery: trio.Nursery
    ) -> Downstream | None:
        volunteer = self._volunteer
        assert volunteer.membership is not None
        manifest, stage = volunteer.membership.manifest, assignment.stage
        last = stage == manifest.stage_count - 1
        book = ReceiptBook(
            volunteer.identity, volunteer.membership.run, stage, volunteer.generation
        )
        self.holding = Holding(stage, worker, Version(assignment.version), book, last)
        if not last:
            self.next_stage = volunteer.downstream(StageIndex(stage + 1), nursery)
        self._rounds = Rounds(
            self.holding, manifest, volunteer.averager, volunteer.send,
            self._save_snapshot, self._applied, volunteer.restart_session,
        )  # fmt: skip
        nursery.start_soon(self._run_rounds, self._rounds)
        return self.next_stage

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
        volunteer.contribution.add_step(
            counted, volunteer.membership.manifest.tokens_per_microbatch
        )
        volunteer.report(
            f"step {apply.step} applied: stage {holding.stage}, {counted} microbatches of it here"
        )
