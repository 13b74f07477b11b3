"""The trainer role: turns leased microbatch indices into token ids and sends them to stage 0.

CPU only and little bandwidth: token ids go out, losses and receipts come back. The samples behind
an index are a pure function of the run's seed, so any trainer can make them again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import numpy as np
import trio

from swarm_client.pipeline.downstream import Downstream, MicrobatchRequest
from swarm_client.pipeline.errors import MicrobatchAbandoned
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.types import MicrobatchIndex, Step
from swarm_shared.protocol import Lease, LeasedMicrobatch, LeaseResult
from swarm_shared.scheduling.inflight_window import InFlightWindow, SendRecord

log = logging.getLogger(__name__)


class Samples(Protocol):
    """Source of token ids."""

    def training(self, step: Step, microbatch: MicrobatchIndex) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets), each sequences × length, int64."""

    def heldout(self, microbatch: MicrobatchIndex) -> tuple[np.ndarray, np.ndarray]: ...


Report = Callable[[LeaseResult], None]
CurrentStep = Callable[[], Step | None]
"""The oldest step that this volunteer's own stage works on; None while it holds none."""


class Trainer:
    """Works through leases with as many microbatches in flight as the pipelines carry.

    Until `begin` leases are ignored: a volunteer without data cannot make samples.
    """

    def __init__(self, report: Report, current_step: CurrentStep, nursery: trio.Nursery) -> None:
        self._report = report
        self._current_step = current_step
        self._nursery = nursery
        self._samples: Samples | None = None
        self._first_stage: Downstream | None = None
        self._waiting: list[tuple[Lease, LeasedMicrobatch]] = []
        self._flight = InFlightWindow()
        self._min_window, self._max_window = 1, 1
        self._refusing: str | None = None
        """Why no lease is taken; None while leases are taken."""
        self._leaving = False

    @property
    def begun(self) -> bool:
        return self._samples is not None

    def begin(self, samples: Samples, first_stage: Downstream) -> None:
        self._samples, self._first_stage = samples, first_stage
        self.step_changed()

    def take(self, lease: Lease) -> None:
        """Accept a lease; its microbatches start as the window allows."""
        if not self.begun:
            return
        self._min_window = max(1, lease.window)
        self._max_window = max(self._min_window, lease.max_window)
        if self._refusing is not None:
            for leased in lease.microbatches:
                self._hand_back(lease, leased, self._refusing)
            return
        self._waiting.extend((lease, leased) for leased in lease.microbatches)
        # An older step's missing microbatches delay its close, and every later step.
        self._waiting.sort(key=lambda entry: entry[0].step)
        self._start_more()

    def leave(self) -> None:
        self._leaving = True
        self._refuse("this volunteer is leaving")

    def pause(self) -> None:
        if not self._leaving:
            self._refuse("this volunteer is paused")

    def resume(self) -> None:
        """Take leases again, unless the volunteer is leaving."""
        if not self._leaving:
            self._refusing = None

    def _refuse(self, reason: str) -> None:
        """Take no lease, and hand back what has not been started."""
        self._refusing = reason
        waiting, self._waiting = self._waiting, []
        for lease, leased in waiting:
            self._hand_back(lease, leased, reason)

    def roster_changed(self) -> None:
        if self._first_stage is not None:
            self._first_stage.roster_changed()

    def step_changed(self) -> None:
        """Abandon what is of an older step than the current one."""
        if self._first_stage is not None:
            self._first_stage.oldest_step_is(self._current_step())

    def _hand_back(self, lease: Lease, leased: LeasedMicrobatch, reason: str) -> None:
        self._report(
            LeaseResult(
                step=lease.step, microbatch=leased.microbatch, lease=lease.lease,
                ok=False, reason=reason[:500],
            )
        )  # fmt: skip

    def _start_more(self) -> None:
        step = self._current_step()
        self._waiting = [entry for entry in self._waiting if step is None or entry[0].step >= step]
        window = self._flight.size(self._min_window, self._max_window)
        while self._waiting and self._flight.in_flight < window:
            lease, leased = self._waiting.pop(0)
            send_record = self._flight.sent(trio.current_time())
            self._nursery.start_soon(self._drive, lease, leased, send_record)

    async def _drive(self, lease: Lease, leased: LeasedMicrobatch, send_record: SendRecord) -> None:
        result: LeaseResult | None = None
        try:
            result = await self._send(lease, leased)
            self._report(result)
        except MicrobatchAbandoned as error:
            self._hand_back(lease, leased, str(error))
        except SwarmError as error:
            log.warning("microbatch %s of step %s: %s", leased.microbatch, lease.step, error)
            self._hand_back(lease, leased, str(error))
        finally:
            if result is not None:
                self._flight.returned(send_record, trio.current_time())
            else:
                self._flight.failed()
            self._start_more()

    async def _send(self, lease: Lease, leased: LeasedMicrobatch) -> LeaseResult:
        assert self._samples is not None
        assert self._first_stage is not None
        evaluate = lease.mode == "evaluate"
        if evaluate:
            inputs_BT, targets_BT = self._samples.heldout(leased.microbatch)
        else:
            inputs_BT, targets_BT = self._samples.training(lease.step, leased.microbatch)
        request = MicrobatchRequest(
            lease.mode,
            lease.step,
            leased.microbatch,
            leased.accumulate,
            np.ascontiguousarray(inputs_BT, dtype="<u4").tobytes(),
            np.ascontiguousarray(targets_BT, dtype="<u4").tobytes(),
        )
        answer = await self._first_stage.send(request)
        header = answer.header
        return LeaseResult(
            step=lease.step,
            microbatch=leased.microbatch,
            lease=lease.lease,
            ok=True,
            receipts=header.receipts,
            evaluation_loss_sum=header.loss_sum if evaluate else None,
            evaluation_tokens=header.tokens if evaluate else 0,
        )
