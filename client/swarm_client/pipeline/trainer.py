"""The trainer role: turns leased microbatch indices into token ids and sends them to stage 0.

CPU only and little bandwidth: token ids go out, losses and receipts come back. The samples behind
an index are a pure function of the run's seed, so any trainer can make them again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import trio

from swarm_client.membership.coordinator_link import CoordinatorLink
from swarm_client.pipeline.downstream import Downstream, MicrobatchAbandoned, MicrobatchRequest
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.types import MicrobatchIndex, Step
from swarm_shared.protocol import Lease, LeasedMicrobatch, LeaseResult
from swarm_shared.volunteer_rules.lease_queue import LeaseQueue, StartedMicrobatch, handed_back

log = logging.getLogger(__name__)


def token_bytes(tokens_BT: np.ndarray) -> bytes:
    """Token ids or targets as they cross the wire: uint32."""
    return np.ascontiguousarray(tokens_BT, dtype="<u4").tobytes()


class Samples(Protocol):
    """Source of token ids (`swarm_client.training_data`)."""

    async def drawn(self, step: Step, microbatch: MicrobatchIndex) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets) of a leased microbatch, each sequences × length, int64. SwarmError when
        its data cannot be had."""

    def expect(self, lease: Lease) -> None:
        """A lease was accepted: its microbatches are asked for soon."""

    def over(self, oldest: Step | None) -> None:
        """Steps before `oldest` are over."""

    def clear(self) -> None:
        """Nothing is asked for until the next lease."""


@dataclass(frozen=True, slots=True)
class _Source:
    """The data and the first stage, which a trainer needs besides leases."""

    samples: Samples
    first_stage: Downstream


class Trainer:
    """Works through leases (`swarm_shared.volunteer_rules.lease_queue`).

    Until `begin` leases are ignored.
    """

    def __init__(self, coordinator: CoordinatorLink, nursery: trio.Nursery) -> None:
        self._coordinator = coordinator
        self._nursery = nursery
        self._leases = LeaseQueue()
        self._oldest_step: Step | None = None
        self._source: _Source | None = None

    @property
    def begun(self) -> bool:
        """Whether `begin` was called."""
        return self._source is not None

    def begin(self, samples: Samples, first_stage: Downstream) -> None:
        """Take leases from now on: read microbatches from `samples`, send them to `first_stage`."""
        self._source = _Source(samples, first_stage)
        samples.over(self._oldest_step)
        first_stage.oldest_step_is(self._oldest_step)

    def take(self, lease: Lease) -> None:
        """Accept a lease; its microbatches start as the window allows."""
        if self._source is not None:
            refused = self._leases.take(lease)
            if not refused:
                self._source.samples.expect(lease)
            self._report_all(refused)
            self._start_more(self._source)

    def leave(self) -> None:
        """Take no more leases; hand back the microbatches that have not started."""
        self._hand_back(self._leases.leave())

    def pause(self) -> None:
        """Hand back the microbatches that have not started, and all later leases until `resume`."""
        self._hand_back(self._leases.pause())

    def resume(self) -> None:
        """Take leases again, unless the volunteer is leaving."""
        self._leases.resume()

    def roster_changed(self) -> None:
        """Open and close edges of the first stage as the roster says."""
        if self._source is not None:
            self._source.first_stage.roster_changed()

    def oldest_step_is(self, step: Step | None) -> None:
        """Abandon what is of an older step than the one that this volunteer's own stage works on;
        None while it holds none."""
        self._oldest_step = step
        if self._source is not None:
            self._source.samples.over(step)
            self._source.first_stage.oldest_step_is(step)

    def _hand_back(self, results: Iterable[LeaseResult]) -> None:
        if self._source is not None:
            self._source.samples.clear()
        self._report_all(results)

    def _report_all(self, results: Iterable[LeaseResult]) -> None:
        for result in results:
            self._coordinator.send(result)

    def _start_more(self, source: _Source) -> None:
        for started in self._leases.start(self._oldest_step, trio.current_time()):
            self._nursery.start_soon(self._drive, source, started)

    async def _drive(self, source: _Source, started: StartedMicrobatch) -> None:
        lease, leased = started.lease, started.leased
        ok = False
        try:
            result = await self._send(source, lease, leased)
            ok = True
            self._coordinator.send(result)
        except MicrobatchAbandoned as error:
            self._coordinator.send(handed_back(lease, leased, str(error)))
        except SwarmError as error:
            log.warning("microbatch %s of step %s: %s", leased.microbatch, lease.step, error)
            self._coordinator.send(handed_back(lease, leased, str(error)))
        finally:
            self._leases.finished(started, trio.current_time(), ok=ok)
            self._start_more(source)

    async def _send(self, source: _Source, lease: Lease, leased: LeasedMicrobatch) -> LeaseResult:
        inputs_BT, targets_BT = await source.samples.drawn(lease.step, leased.microbatch)
        request = MicrobatchRequest(
            lease.step,
            leased.microbatch,
            leased.accumulate,
            token_bytes(inputs_BT),
            token_bytes(targets_BT),
            leased.ticket,
            leased.is_copy,
        )
        answer = await source.first_stage.send(request)
        header = answer.header
        return LeaseResult(
            step=lease.step,
            microbatch=leased.microbatch,
            lease=lease.lease,
            ok=True,
            receipts=header.receipts,
            owing=header.owing,
        )
