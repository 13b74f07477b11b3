"""Seconds of this peer's uplink that one microbatch of its stage takes, beside the all-reduces.

A sender observes how long a peer computes and how long its answers take, but not how long the
peer's own sends wait for its uplink. The peer knows its uplink's rate, once that has held it up
(`swarm_shared.network.libp2p.uplink_estimate`), and the bytes that it sends for a microbatch. It
reports the quotient, and routing gives slow uplinks as much as they carry.

Where a step closes while the next one is computed (staleness), all-reduces use the same uplink at
the same time. Their recent rate is subtracted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarm_client.pipeline.held_stage import Holding
from swarm_shared.base.clock import Clock, monotonic
from swarm_shared.network import Bandwidth

MIN_ACTIVATION_SHARE = 0.25
"""Fraction of the uplink always counted as free for activations. Fewer microbatches make shorter
steps, so the estimated all-reduce share would otherwise grow until none are left."""


@dataclass(slots=True, eq=False)
class UplinkShare:
    """Estimate for one peer."""

    uplink: Bandwidth
    all_reduce_bytes: Callable[[], int]
    """Bytes sent in all-reduces so far."""
    clock: Clock = monotonic
    _step_began: float | None = None
    _bytes_before: int = 0
    _all_reduce_bytes_per_second: float = 0.0

    def step_applied(self) -> None:
        """Update the all-reduce rate with the bytes of one more step."""
        now, sent = self.clock(), self.all_reduce_bytes()
        if self._step_began is not None and now > self._step_began:
            self._all_reduce_bytes_per_second = (sent - self._bytes_before) / (
                now - self._step_began
            )
        self._step_began, self._bytes_before = now, sent

    def microbatch_seconds(self, holding: Holding) -> float:
        """Seconds for the activation and the gradient that a microbatch sends; 0 while the uplink
        has held nothing up."""
        up = self.uplink.own_up_bytes_per_second
        if not up:
            return 0.0
        sizes = holding.worker.sizes
        available = up - self._all_reduce_bytes_per_second if holding.account.staleness else up
        return (sizes.output_bytes + sizes.input_gradient_bytes) / max(
            available, MIN_ACTIVATION_SHARE * up
        )
