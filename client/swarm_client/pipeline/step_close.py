"""This peer's side of a step close: reconcile, average, report, apply (design: the life of a step).

One task takes Close, AbortRound, Apply and SaveSnapshot in order. A close is reconciled with the
coordinator's commit set, averaged in the named groups on a copy, and reported; an abort cancels it
at once and leaves the accumulator unchanged. With staleness the next step is computed meanwhile;
only the step that is applied next closes.

A peer that moves loads its next stage beside the held one. In the close that names both stages it
averages both; to the new one it has added nothing. The Apply of that attempt makes the new stage
the held one (docs/decisions/0014-rebalancing.md).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import trio

from swarm_client.fault_injection import faults
from swarm_client.fault_injection.faults import FaultPoint
from swarm_client.pipeline.held_stage import Holding
from swarm_client.stage.protocol.errors import RequestFailed, WorkerDied
from swarm_shared.base.errors import ProtocolError, SwarmError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import PeerId, Step
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

log = logging.getLogger(__name__)


class AveragingFailed(SwarmError):
    """One all-reduce failed for all its members; its inputs are unchanged."""

    def __init__(self, reason: str, culprit: PeerId | None, carrier_failed: bool) -> None:
        super().__init__(reason)
        self.culprit = culprit
        self.carrier_failed = carrier_failed


class Averager(Protocol):
    """Carries out one reduction over the named group."""

    async def reduce(
        self, holding: Holding, step: Step, attempt: int, reduction: Reduction
    ) -> None:
        """Fill this part of the result segment, or raise AveragingFailed."""


class CloseHandler(Protocol):
    """The volunteer's stage manager, as a step close uses it."""

    def send(self, message: FrozenModel) -> None:
        """Send to the coordinator, if there is a session."""

    async def save_snapshot(self, holding: Holding, request: SaveSnapshot) -> None: ...

    def step_applied(self, holding: Holding, apply: Apply, counted: int) -> None:
        """Record an applied step in which this peer counted so many microbatches."""

    def rejoin(self) -> None:
        """The run has applied a step that this peer cannot apply: attach again."""

    def prepared(self) -> Holding | None:
        """The stage that is loaded for a move, if any."""

    def switch_to_prepared(self, prepared: Holding) -> None:
        """Make the prepared stage the held one, and end this step closer."""

    def drop_outdated(self) -> None:
        """A step was applied without the prepared stage: drop it."""


CloseOrder = Close | AbortRound | Apply | SaveSnapshot

MAX_QUEUED_ORDERS = 256
"""Maximum number of orders that wait to be carried out; each takes a moment."""


class StepCloser:
    """Closes the steps of one held stage: `put` orders, and run `run` while the stage is held."""

    def __init__(
        self, holding: Holding, manifest: Manifest, averager: Averager, handler: CloseHandler
    ) -> None:
        self._holding = holding
        self._manifest = manifest
        self._averager = averager
        self._handler = handler
        self._put, self._inbox = trio.open_memory_channel[tuple[int, CloseOrder]](MAX_QUEUED_ORDERS)
        self._session = 0
        """Number of the session from which orders arrive now."""
        self._attempt: tuple[Step, int] | None = None
        self._aborted_attempts: set[tuple[Step, int]] = set()
        """Attempts whose abort is queued behind them."""
        self._scope: trio.CancelScope | None = None

    def put(self, message: CloseOrder) -> None:
        """Queue an order. ProtocolError when MAX_QUEUED_ORDERS wait already."""
        prepared = self._handler.prepared()
        if isinstance(message, AbortRound) and prepared is not None:
            prepared.averaged_attempt = None
        try:
            self._put.send_nowait((self._session, message))
        except trio.WouldBlock as error:
            raise ProtocolError(
                f"{MAX_QUEUED_ORDERS} orders of the coordinator already wait to be carried out; "
                "this volunteer attaches again"
            ) from error
        if not isinstance(message, AbortRound):
            return
        attempt = (message.step, message.attempt)
        if self._attempt == attempt:
            assert self._scope is not None
            self._scope.cancel()
        else:
            self._aborted_attempts.add(attempt)

    def session_lost(self) -> None:
        """End the running attempt, whose report cannot be sent; what is averaged stays."""
        if self._scope is not None:
            self._scope.cancel()
        self._holding.account.reopen()
        self._session += 1

    async def run(self) -> None:
        async for session, message in self._inbox:
            if isinstance(message, Close):
                # No member joins an attempt that is over: averaging would wait until it fails.
                over = (message.step, message.attempt) in self._aborted_attempts
                if session == self._session and not over:
                    await self._close(message)
            elif isinstance(message, AbortRound):
                self._aborted_attempts.discard((message.step, message.attempt))
                self._holding.account.reopen()
                self._holding.averaged_attempt = None
            elif isinstance(message, Apply):
                await self._apply(message)
            else:
                await self._handler.save_snapshot(self._holding, message)

    async def _close(self, close: Close) -> None:
        holding = self._holding
        if close.step != holding.step:
            self._handler.send(
                RoundReport(
                    step=close.step, attempt=close.attempt, ok=False, missing=close.committed,
                    reason=f"this peer can close step {holding.step}",
                )
            )  # fmt: skip
            return
        self._attempt = (close.step, close.attempt)
        holding.account.settle()
        holding.averaged_attempt = None
        with trio.CancelScope() as self._scope:
            try:
                report = await self._average(close)
            except AveragingFailed as error:
                report = RoundReport(
                    step=close.step, attempt=close.attempt, ok=False, reason=str(error)[:500],
                    culprit=error.culprit, carrier_failed=error.carrier_failed,
                )  # fmt: skip
            except WorkerDied:
                raise
            except SwarmError as error:
                report = RoundReport(
                    step=close.step, attempt=close.attempt, ok=False, reason=str(error)[:500]
                )
            if report.ok:
                holding.averaged_attempt = close.attempt
            self._handler.send(report)
        if self._scope.cancelled_caught:
            holding.account.reopen()
        self._attempt = self._scope = None

    async def _average(self, close: Close) -> RoundReport:
        if not close.moving:
            return await self._average_held(close)
        prepared = self._handler.prepared()
        if prepared is None or close.step != prepared.step:
            return RoundReport(
                step=close.step, attempt=close.attempt, ok=False,
                reason="no stage is prepared for this move",
            )  # fmt: skip
        prepared.averaged_attempt = None
        reports: list[RoundReport] = []
        failed: list[SwarmError] = []

        async def average_held() -> None:
            try:
                reports.append(await self._average_held(close))
            except SwarmError as error:
                failed.append(error)
            if failed or not reports[0].ok:
                nursery.cancel_scope.cancel()

        async def average_prepared() -> None:
            try:
                await self._average_prepared(prepared, close, close.moving)
            except SwarmError as error:
                failed.append(error)
                nursery.cancel_scope.cancel()

        # Concurrently: the new stage's members do not wait until the old stage is averaged.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(average_held)
            nursery.start_soon(average_prepared)
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
            # The prepared stage's own tenure handles its death; the held stage continues.
            raise AveragingFailed(f"of the next stage: {error}", None, False) from error
        if not norm.finite:
            raise AveragingFailed("the next stage's averaged gradient is not finite", None, False)

    async def _average_held(self, close: Close) -> RoundReport:
        holding, worker = self._holding, self._holding.worker
        failed = await self._reconcile(close)
        if failed is not None:
            return failed
        faults.inject_outage(FaultPoint.ALL_REDUCE, close.step)
        for reduction in close.reductions:
            await self._averager.reduce(holding, close.step, close.attempt, reduction)
        faults.inject_outage(FaultPoint.NORM, close.step)
        norm = await worker.norm(close.step, self._manifest.tokens_per_step)
        if not norm.finite:
            return RoundReport(
                step=close.step, attempt=close.attempt, ok=False, not_finite=True,
                reason="the averaged gradient is not finite",
            )  # fmt: skip
        return RoundReport(
            step=close.step,
            attempt=close.attempt,
            ok=True,
            own_squared=norm.own_squared,
            tied_squared=norm.tied_squared,
        )

    async def _reconcile(self, close: Close) -> RoundReport | None:
        """Make the gradients segment hold exactly the committed microbatches, or report why not."""
        holding, worker = self._holding, self._holding.worker
        while True:
            prepared = await worker.prepare_round(close.step)
            difference = holding.account.reconcile(close.committed, prepared.microbatches)
            extra, missing = difference.extra, difference.missing
            if not extra:
                break
            if not await worker.uncommit(close.step, extra):
                await worker.reset_accumulator(close.step)
                holding.account.emptied(close.step)
                return RoundReport(
                    step=close.step, attempt=close.attempt, ok=False, reset=True,
                    reason=f"{len(extra)} extra microbatches could not be removed",
                )  # fmt: skip
            holding.account.removed(close.step, extra)
        if not prepared.finite:
            # Each one was finite when it was added; after this no part of the sum is trusted.
            await worker.reset_accumulator(close.step)
            holding.account.emptied(close.step)
            return RoundReport(
                step=close.step, attempt=close.attempt, ok=False, reset=True, not_finite=True,
                reason="the sum of its gradients is not finite",
            )  # fmt: skip
        if missing:
            holding.account.removed(close.step, missing)
            return RoundReport(
                step=close.step, attempt=close.attempt, ok=False, missing=missing,
                reason=f"{len(missing)} committed microbatches are not held here",
            )  # fmt: skip
        return None

    async def _apply(self, apply: Apply) -> None:
        prepared = self._handler.prepared()
        if prepared is not None and prepared.averaged_attempt == apply.attempt:
            await self._apply_prepared(prepared, apply)
        else:
            await self._apply_held(apply)
            self._handler.drop_outdated()

    async def _apply_prepared(self, prepared: Holding, apply: Apply) -> None:
        """Apply the step in the stage that this peer moves to."""
        try:
            done = await prepared.worker.apply(
                apply.step, self._manifest.tokens_per_step, apply.global_norm, apply.learning_rate
            )
        except (WorkerDied, RequestFailed):
            # The run counts on this peer in its new stage, which is lost: join again.
            self._handler.rejoin()
            return
        counted = self._holding.account.count(apply.step)
        prepared.account.applied(done.version)
        prepared.averaged_attempt = None
        self._handler.step_applied(prepared, apply, counted)
        self._handler.send(Applied(step=apply.step, digest=done.digest, norm=done.norm))
        self._handler.switch_to_prepared(prepared)

    async def _apply_held(self, apply: Apply) -> None:
        holding = self._holding
        if apply.step != holding.step or holding.averaged_attempt != apply.attempt:
            log.warning("the coordinator applies step %s, which is not averaged here", apply.step)
            self._handler.rejoin()
            return
        faults.inject_outage(FaultPoint.APPLY, apply.step)
        try:
            done = await holding.worker.apply(
                apply.step, self._manifest.tokens_per_step, apply.global_norm, apply.learning_rate
            )
        except RequestFailed as error:
            # The other members apply the step; the stage held here is out of date.
            holding.averaged_attempt = None
            self._handler.send(
                RoundReport(
                    step=apply.step, attempt=apply.attempt, ok=False, reset=True,
                    reason=str(error)[:500],
                )
            )  # fmt: skip
            return
        counted = holding.account.applied(done.version)
        holding.averaged_attempt = None
        self._handler.step_applied(holding, apply, counted)
        self._handler.send(Applied(step=apply.step, digest=done.digest, norm=done.norm))
