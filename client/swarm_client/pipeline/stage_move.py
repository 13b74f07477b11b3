"""Closing a step as a member of two stages: of the one that is left, and of the one come to.

A peer that is to move gets its next stage's state beside the stage that it serves. In the close
that names both it averages both; to the new one it has added nothing. The Apply of that attempt
makes the new one the stage that it holds (docs/decisions/0014-rebalancing.md).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

from swarm_client.pipeline.held_stage import Holding
from swarm_client.pipeline.step_close import Averager, AveragingFailed, StepCloser
from swarm_client.stage.protocol.errors import RequestFailed, WorkerDied
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.protocol import (
    AbortRound,
    Applied,
    Apply,
    Close,
    Reduction,
    RoundReport,
    SaveSnapshot,
)
from swarm_shared.run.manifest import Manifest


class MovingStepCloser(StepCloser):
    """`StepCloser` of the stage that is held, which also knows of the one that is prepared."""

    def __init__(
        self,
        holding: Holding,
        manifest: Manifest,
        averager: Averager,
        send: Callable[[FrozenModel], None],
        save_snapshot: Callable[[Holding, SaveSnapshot], Awaitable[None]],
        applied: Callable[[Holding, Apply, int], None],
        out_of_step: Callable[[], None],
        prepared: Callable[[], Holding | None],
        switch: Callable[[Holding], None],
        outdated: Callable[[], None],
    ) -> None:
        """`switch` makes what is prepared the stage that is held, and ends these rounds.

        `outdated` is called when a step was applied that what is prepared took no part in.
        """
        super().__init__(holding, manifest, averager, send, save_snapshot, applied, out_of_step)
        self._prepared = prepared
        self._switch = switch
        self._outdated = outdated

    def put(self, message: Close | AbortRound | Apply | SaveSnapshot) -> None:
        prepared = self._prepared()
        if isinstance(message, AbortRound) and prepared is not None:
            prepared.averaged_attempt = None
        super().put(message)

    async def _average(self, close: Close) -> RoundReport:
        if not close.moving:
            return await super()._average(close)
        prepared = self._prepared()
        if prepared is None or close.step != prepared.step:
            return RoundReport(
                step=close.step, attempt=close.attempt, ok=False, reason="nothing is prepared here"
            )
        prepared.averaged_attempt = None
        reports: list[RoundReport] = []
        failed: list[SwarmError] = []

        async def own() -> None:
            try:
                reports.append(await super(MovingStepCloser, self)._average(close))
            except SwarmError as error:
                failed.append(error)
            if failed or not reports[0].ok:
                nursery.cancel_scope.cancel()

        async def other() -> None:
            try:
                await self._average_prepared(prepared, close, close.moving)
            except SwarmError as error:
                failed.append(error)
                nursery.cancel_scope.cancel()

        # At the same time: the members of the new stage do not wait until the old one is done.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(own)
            nursery.start_soon(other)
        if failed:
            raise failed[0]
        if reports[0].ok:
            prepared.averaged_attempt = close.attempt
        return reports[0]

    async def _average_prepared(
        self, prepared: Holding, close: Close, reductions: Sequence[Reduction]
    ) -> None:
        worker = prepared.worker
        try:
            await worker.prepare_round(close.step)
            for reduction in reductions:
                await self._averager.reduce(prepared, close.step, close.attempt, reduction)
            norm = await worker.norm(close.step, self._manifest.tokens_per_step)
        except WorkerDied as error:
            # Its own task sees to that; the stage that is held lives on.
            raise AveragingFailed(f"of the next stage: {error}", None, False) from error
        if not norm.finite:
            raise AveragingFailed("the next stage's averaged gradient is not finite", None, False)

    async def _apply(self, apply: Apply) -> None:
        prepared = self._prepared()
        if prepared is None or prepared.averaged_attempt != apply.attempt:
            await super()._apply(apply)
            self._outdated()
            return
        try:
            done = await prepared.worker.apply(
                apply.step, self._manifest.tokens_per_step, apply.global_norm, apply.learning_rate
            )
        except (WorkerDied, RequestFailed):
            # The run counts on it in its new stage, which is lost: come back as a newcomer.
            self._out_of_step()
            return
        counted = self._holding.receipts.count(apply.step)
        prepared.version = done.version
        prepared.averaged_attempt = None
        self._applied(prepared, apply, counted)
        self._send(Applied(step=apply.step, digest=done.digest, norm=done.norm))
        self._switch(prepared)
