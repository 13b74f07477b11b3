"""Masks: which stages are to count a microbatch, for a trainer that sends it once more.

Part of the pure core.
"""

from __future__ import annotations

from swarm_coordinator.core.rules.microbatches import cells
from swarm_coordinator.core.state.peers import PeerState
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.steps import PendingMask
from swarm_shared.protocol import Mask, MaskRequest


def queue_mask_request(run: RunState, peer: PeerState, request: MaskRequest, now: float) -> None:
    """Queue a mask request. The answer waits a little longer than one reporting interval, so that
    receipts under way are counted first."""
    wait = 1.2 * run.manifest.limits.receipt_interval_seconds
    run.steps.masks.append(
        PendingMask(now + wait, peer.peer, request.request, request.step, request.microbatch)
    )


def answer_masks(run: RunState, now: float) -> None:
    """Answer the mask requests that are due."""
    if not run.steps.masks or run.steps.masks[0].due_at > now:
        return  # requests arrive in the order of time, and all wait equally long
    due = [mask for mask in run.steps.masks if mask.due_at <= now]
    run.steps.masks = [mask for mask in run.steps.masks if mask.due_at > now]
    for mask in due:
        step = run.steps.numbered(mask.step)
        accumulate = () if step is None else cells.missing_stages(run, step, mask.microbatch)
        run.send(mask.peer, Mask(request=mask.request, accumulate=accumulate))
