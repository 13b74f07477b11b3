"""This peer's side of close, norm and apply (design: the life of a step).

One task takes Close, AbortRound, Apply and SaveSnapshot in their order. A close is reconciled
with what the coordinator committed, averaged in the named groups on a copy, and reported; an
abort cancels it at once and leaves the accumulator as it is. With staleness the step after it is
computed meanwhile; only the step that is applied next closes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from swarm_client.fault_injection import faults
from swarm_client.fault_injection.faults import FaultPoint
from swarm_client.pipeline.held_stage import Holding
from swarm_client.stage.protocol.errors import RequestFailed, WorkerDied
from swarm_shared.base.errors import ProtocolError, SwarmError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import MicrobatchIndex, PeerId, Step
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
    """One all-reduce failed for everybody in it; inputs are untouched."""

    def __init__(self, reason: str, culprit: PeerId | None, carrier_failed: bool) -> None:
        super().__init__(reason)
        self.culprit = culprit
        self.carrier_failed = carrier_failed


class Averager(Protocol):
    """Carries out one reduction over the named group."""

    async def reduce(
        self, holding: Holding, step: Step, attempt: int, reduction: Reduction
    ) -> None:
        """Fill the result segment's part; AveragingFailed otherwise."""


CloseOrder = Close | AbortRound | Apply | SaveSnapshot

MAX_QUEUED_ORDERS = 256
"""That wait, of which each takes a moment."""


class StepCloser:
    """Give it messages with `put`; run `run` while a stage is held."""

    def __init__(
        self,
        holding: Holding,
        manifest: Manifest,
        averager: Averager,
        send: Callable[[FrozenModel], None],
        save_snapshot: Callable[[Holding, SaveSnapshot], Awaitable[None]],
        applied: Callable[[Holding, Apply, int], None],
        out_of_step: Callable[[], None],
    ) -> None:
        """`out_of_step` is called when the run has applied what this peer cannot apply."""
        self._holding = holding
        self._manifest = manifest
        self._averager = averager
        self._send = send
        self._save_snapshot = save_snapshot
        self._applied = applied
        self._out_of_step = out_of_step
        self._put, self._inbox = trio.open_memory_channel[tuple[int, CloseOrder]](MAX_QUEUED_ORDERS)
        self._session = 0
        """Of the orders that come now; counts up."""
        self._attempt: tuple[Step, int] | None = None
        self._aborted_attempts: set[tuple[Step, int]] = set()
        """Attempts that wait and whose end waits behind them."""
        self._scope: trio.CancelScope | None = None

    def put(self, message: CloseOrder) -> None:
        """ProtocolError when so many wait already that something must be wrong."""
        try:
            self._put.send_nowait((self._session, message))
        except trio.WouldBlock as error:
            raise ProtocolError(
                f"the coordinator has sent {MAX_QUEUED_ORDERS} orders that wait to be carried out; "
                "this volunteer takes no more before it has attached again"
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
        """The coordinator is away: an attempt it cannot hear of is over, what is averaged stays."""
        if self._scope is not None:
            self._scope.cancel()
        self._holding.closing = False
        self._session += 1

    async def run(self) -> None:
        async for session, message in self._inbox:
            if isinstance(message, Close):
                # Nobody comes to an attempt that is over: it would be waited for until it fails.
                over = (message.step, message.attempt) in self._aborted_attempts
                if session == self._session and not over:
                    await self._close(message)
            elif isinstance(message, AbortRound):
                self._aborted_attempts.discard((message.step, message.attempt))
                self._holding.closing = False
                self._holding.averaged_attempt = None
            elif isinstance(message, Apply):
                await self._apply(message)
            else:
                await self._save_snapshot(self._holding, message)

    async def _close(self, close: Close) -> None:
        holding = self._holding
        if close.step != holding.step:
            self._send(
                RoundReport(
                    step=close.step, attempt=close.attempt, ok=False, missing=close.committed,
                    reason=f"this peer can close step {holding.step}",
                )
            )  # fmt: skip
            return
        self._attempt = (close.step, close.attempt)
        holding.closing, holding.averaged_attempt = True, None
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
            self._send(report)
        if self._scope.cancelled_caught:
            holding.closing = False
        self._attempt = self._scope = None

    async def _average(self, close: Close) -> RoundReport:
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
        """Make the gradients segment hold exactly the committed microbatches, or say why not."""
        holding, worker = self._holding, self._holding.worker
        committed = set(close.committed)
        while True:
            prepared_round = await worker.prepare_round(close.step)
            prepared = set(prepared_round.microbatches)
            extra = tuple(sorted(prepared - committed))
            if not extra:
                break
            if not await worker.uncommit(close.step, extra):
                await worker.reset_accumulator(close.step)
                holding.receipts.clear(close.step)
                return RoundReport(
                    step=close.step, attempt=close.attempt, ok=False, reset=True,
                    reason=f"{len(extra)} extra microbatches could not be taken out again",
                )  # fmt: skip
            holding.receipts.drop(close.step, extra)
        if not prepared_round.finite:
            # Each of them was finite when it was added. Whatever happened since, none is trusted.
            await worker.reset_accumulator(close.step)
            holding.receipts.clear(close.step)
            return RoundReport(
                step=close.step, attempt=close.attempt, ok=False, reset=True, not_finite=True,
                reason="the sum of its gradients is not finite",
            )  # fmt: skip
        missing: tuple[MicrobatchIndex, ...] = tuple(sorted(committed - prepared))
        if missing:
            holding.receipts.drop(close.step, missing)
            return RoundReport(
                step=close.step, attempt=close.attempt, ok=False, missing=missing,
                reason=f"{len(missing)} committed microbatches are not held here",
            )  # fmt: skip
        return None

    async def _apply(self, apply: Apply) -> None:
        holding = self._holding
        if apply.step != holding.step or holding.averaged_attempt != apply.attempt:
            log.warning("told to apply step %s, which is not averaged here", apply.step)
            self._out_of_step()
            return
        faults.inject_outage(FaultPoint.APPLY, apply.step)
        try:
            done = await holding.worker.apply(
                apply.step, self._manifest.tokens_per_step, apply.global_norm, apply.learning_rate
            )
        except RequestFailed as error:
            # The others take the step. What is held here is of no use any more.
            holding.averaged_attempt = None
            self._send(
                RoundReport(
                    step=apply.step, attempt=apply.attempt, ok=False, reset=True,
                    reason=str(error)[:500],
                )
            )  # fmt: skip
            return
        holding.version = done.version
        holding.averaged_attempt = None
        holding.closing = False
        counted = holding.receipts.count(apply.step)
        holding.receipts.clear(apply.step)
        self._applied(holding, apply, counted)
        self._send(Applied(step=apply.step, digest=done.digest, norm=done.norm))
