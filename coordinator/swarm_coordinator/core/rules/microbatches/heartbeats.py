"""Heartbeats: the rates and the utilisation that peers report.

Part of the pure core.
"""

from __future__ import annotations

import math

from swarm_coordinator.core.rules import roster
from swarm_coordinator.core.state.peers import PeerPhase, PeerState
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.run import RunState
from swarm_shared.protocol import Heartbeat

RATE_SMOOTHING = 0.3
"""Weight of the newest report in a peer's rate: about the last five count, which span a few
seconds."""

RATE_NOISE = 0.1
"""Relative distance of a report from the smoothed rate up to which it counts as noise. The plan of
a step (`swarm_shared.scheduling.step_plan`) ends when the peer ends whose rate is the most too
high, so that noise costs more the more peers there are. A larger change counts at once."""

_STEPPING = frozenset({RunPhase.COLLECT, RunPhase.CLOSING, RunPhase.APPLYING})
"""Phases in which a stage without work counts as idle."""


def record_heartbeat(run: RunState, peer: PeerState, message: Heartbeat, now: float) -> None:
    """Update a peer's rates, its queue length, whether it pauses and its class of arithmetic."""
    if peer.paused != message.paused:
        # Senders must learn of it before they send the peer anything else.
        run.peers.set_paused(peer, message.paused)
        if run.peers.holds_current(peer):
            roster.changed(run, peer.peer, now)
    if message.arithmetic is not None:
        peer.arithmetic = message.arithmetic
    rates = peer.rates
    computed, up = message.microbatches_per_second, message.up_bytes_per_second
    if computed is None:
        computed = rates.reported_microbatches_per_second
    else:
        rates.reported_microbatches_per_second = computed
    up_bytes_per_second = rates.up_bytes_per_second if up is None else up or math.inf
    sent, flops_per_second = math.inf, rates.flops_per_second
    uplink_flops_per_second = rates.uplink_flops_per_second
    if peer.phase is PeerPhase.READY and peer.stage is not None:
        stage = run.rebalancing.stages[peer.stage]
        if stage.sent_bytes:
            sent = up_bytes_per_second / stage.sent_bytes
        uplink_flops_per_second = sent * stage.work_flops
        if computed > 0:
            reported = computed * stage.work_flops
            previous = flops_per_second or reported
            flops_per_second = previous + RATE_SMOOTHING * (reported - previous)
            average = flops_per_second / stage.work_flops
            if abs(average - computed) <= RATE_NOISE * computed:
                computed = average
        else:
            computed = flops_per_second / stage.work_flops  # as measured at other stages
    run.peers.record_rates(
        peer, now, message.queued, min(computed, sent), flops_per_second, up_bytes_per_second,
        uplink_flops_per_second,
    )  # fmt: skip
    _record_utilisation(run, peer, message, now)


def _record_utilisation(run: RunState, peer: PeerState, message: Heartbeat, now: float) -> None:
    """Record the time that the peer computed, if it could have had work."""
    counts = (
        run.phase in _STEPPING
        and peer.phase is PeerPhase.READY
        and peer.stage is not None
        and not peer.paused
    )
    if counts and peer.stage is not None and message.busy_seconds is not None:
        limit = run.manifest.training.microbatches_per_step
        run.statistics.utilisation.record(
            peer.last_heartbeat, peer.stage, message.busy_seconds, min(message.computed, limit), now
        )
    else:
        peer.last_heartbeat.held = None
