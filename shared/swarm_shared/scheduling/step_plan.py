"""The plan of one stage for one step: which peer each microbatch is for.

The plan is a pure function of the roster's rates and of the number of microbatches of a step, so
every sender makes the same one, and they need not exchange anything to share the peers among them.
Each peer gets work in proportion to its rate, and microbatches with neighbouring numbers, which are
under way at the same time, are for different peers. (It is list scheduling on uniform machines,
Graham 1969: each microbatch goes to the machine that would be done with it first.) The numbers
follow the order in which the peers are done, so that the last ones are not those of slow peers.
"""

from __future__ import annotations

import functools
import heapq
import statistics
from collections.abc import Mapping

from swarm_shared.base.types import PeerId

MAX_PLANNED = 4096
"""Most entries of a plan, which is repeated for further microbatches: about 5 ms of computing."""

HANDICAP = 1.0
"""Microbatches that each peer is planned as having had before the step. A microbatch passes all
stages twice, so that the last ones of a slow peer would end long after all others."""


def prior_seconds(rates: Mapping[PeerId, float]) -> dict[PeerId, float]:
    """Return the seconds per microbatch that follow from the roster's rates; the mean rate for
    peers without one. Empty if no rate is known."""
    known_rates = [rate for rate in rates.values() if rate > 0]
    if not known_rates:
        return {}
    mean = statistics.fmean(known_rates)
    return {peer: 1 / (rate if rate > 0 else mean) for peer, rate in rates.items()}


@functools.lru_cache(maxsize=64)
def plan_step(seconds: tuple[tuple[PeerId, float], ...], microbatches: int) -> tuple[PeerId, ...]:
    """Return the peer of each microbatch, from the peers and their seconds per microbatch in the
    order of their names.

    Cached, because one process may have many senders to the same stage.
    """
    done_at = [
        ((1 + HANDICAP) * peer_seconds, peer, peer_seconds) for peer, peer_seconds in seconds
    ]
    heapq.heapify(done_at)
    planned: list[tuple[float, PeerId]] = []
    for _ in range(min(microbatches, MAX_PLANNED)):
        peer_done_at, peer, peer_seconds = done_at[0]
        planned.append((peer_done_at - HANDICAP * peer_seconds, peer))
        heapq.heapreplace(done_at, (peer_done_at + peer_seconds, peer, peer_seconds))
    return tuple(peer for _, peer in sorted(planned))
