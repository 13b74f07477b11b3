"""What this peer's line takes for one microbatch of its stage, beside the averages that it carries.

A sender sees how long a peer computes and how long its answers are on their way, but not how long
what that peer hands on waits for the same line. The peer knows: what its line takes, once that has
held it up (`swarm_shared.network.libp2p.uplink_estimate`), and what it sends for a microbatch. So
it tells, and
routing gives thin lines as much as they carry.

Where a step closes while the next one is computed (staleness), averages go up the same line at the
same time. What they took lately is not there for microbatches.
"""

from __future__ import annotations

from typing import Protocol

from swarm_client.pipeline.held_stage import Holding
from swarm_shared.base.clock import Clock, monotonic

MIN_ACTIVATION_SHARE = 0.25
"""Of a line, that counts as left for microbatches: steps are shorter the less a peer is given of
them, so that averages alone would seem to fill a thin line in the end."""


class UplinkEstimate(Protocol):
    @property
    def own_up_bytes_per_second(self) -> float:
        """What the line takes; 0 while that is unknown."""


class AllReduceTraffic(Protocol):
    @property
    def sent_bytes(self) -> int:
        """In averages, so far."""


class UplinkShare:
    """Of one peer, over its line."""

    def __init__(
        self, line: UplinkEstimate, averages: AllReduceTraffic, clock: Clock = monotonic
    ) -> None:
        self._uplink = line
        self._all_reduce = averages
        self._clock = clock
        self._step_began: float | None = None
        self._bytes_before = 0
        self._all_reduce_bytes_per_second = 0.0

    def step_applied(self) -> None:
        """Look at what the averages of one more step have taken."""
        now, sent = self._clock(), self._all_reduce.sent_bytes
        if self._step_began is not None and now > self._step_began:
            self._all_reduce_bytes_per_second = (sent - self._bytes_before) / (
                now - self._step_began
            )
        self._step_began, self._bytes_before = now, sent

    def microbatch_seconds(self, holding: Holding) -> float:
        """For the activation and the gradient that a microbatch sends; 0 while the line has held
        nothing up."""
        up = self._uplink.own_up_bytes_per_second
        if not up:
            return 0.0
        sizes = holding.worker.sizes
        left = up - self._all_reduce_bytes_per_second if holding.staleness else up
        return (sizes.output_bytes + sizes.input_gradient_bytes) / max(
            left, MIN_ACTIVATION_SHARE * up
        )
