"""Pauses before a microbatch that has no finite result is leased again."""

from __future__ import annotations

from itertools import cycle, pairwise

from kits.swarm_world.event_bench import joined
from swarm_shared.base.types import MicrobatchIndex, PeerId, Step
from swarm_shared.protocol import NotFinite

FIRST = MicrobatchIndex(0)


def test_pauses_grow_with_all_reports_of_a_microbatch_at_whichever_stages() -> None:
    bench = joined("a0", "a1", microbatches=1)
    leased_at = [bench.now]
    for peer in cycle(("a0", "a1")):
        if len(leased_at) > 8:
            break
        bench.send(peer, NotFinite(step=Step(1), microbatch=FIRST, sender=PeerId(peer)))
        lease = bench.step().leases[FIRST]
        bench.resolve(lease.trainer, FIRST, lease.lease, ok=False)
        while not bench.leased():
            bench.tick(0.5)
        leased_at.append(bench.now)
    pauses = [late - early for early, late in pairwise(leased_at)]
    assert pauses == [1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 4.0, 8.0]
