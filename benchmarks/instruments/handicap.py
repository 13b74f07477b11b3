"""A volunteer with a fixed pace, or with equal shares, for measurements on one machine.

    python -m benchmarks.instruments.handicap PYTHON -m MODULE WORDS...

runs MODULE with WORDS as PYTHON -m would, with the handicaps that the environment asks for:
PACE_VARIABLE (`benchmarks.instruments.pace`) and EQUAL_SHARES_VARIABLE.
`benchmarks.instruments.inside.prefix_of` makes the prefix. Without these variables the program is
unchanged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from benchmarks.instruments.inside import run_module, wrapped
from benchmarks.instruments.pace import PACE_VARIABLE
from swarm_client.pipeline import stage_links
from swarm_client.stage.handle import warm_worker
from swarm_client.volunteer.gradient_averager import GroupAverager
from swarm_shared.base.types import MicrobatchIndex, PeerId
from swarm_shared.protocol import Reduction
from swarm_shared.scheduling.routing import StageRouting

INSTRUMENT = "benchmarks.instruments.handicap"
PACED_WORKER_MODULE = "benchmarks.instruments.paced_worker"

EQUAL_SHARES_VARIABLE = "SWARM_EQUAL_SHARES"
"""Set to any value: every peer of a stage gets as many microbatches as the others, and sums as much
of its gradients. Either all volunteers of a run have it or none."""


class EqualShares(StageRouting):
    """Routing by turns: each peer in its turn, whatever its rate, and no other while it is full.

    The baseline against which routing by rates is measured.
    """

    def choose(
        self, now: float, in_flight: Mapping[PeerId, int], microbatch: MicrobatchIndex | None
    ) -> PeerId | None:
        allowed = [p for p, c in self._candidates.items() if c.banned_until <= now]
        if not allowed:
            return super().choose(now, in_flight, None)
        peer = allowed[self._turns % len(allowed)]
        if peer not in in_flight:
            return None
        self._turns += 1
        return peer

    _turns = 0


@contextmanager
def handicapped() -> Iterator[None]:
    """Apply the handicaps of the environment to the volunteer that this process runs."""
    with ExitStack() as stack:
        if os.environ.get(PACE_VARIABLE):
            stack.enter_context(
                mock.patch.object(warm_worker, "WORKER_MODULE", PACED_WORKER_MODULE)
            )
        if os.environ.get(EQUAL_SHARES_VARIABLE):
            stack.enter_context(mock.patch.object(stage_links, "StageRouting", EqualShares))
            stack.enter_context(wrapped([(GroupAverager, GroupAverager.reduce, _without_weights)]))
        yield


def _without_weights(reduce: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def unweighted(
        averager: GroupAverager, worker: Any, step: int, attempt: int, reduction: Reduction
    ) -> None:
        equal = reduction.model_copy(update={"weights": ()})
        await reduce(averager, worker, step, attempt, equal)

    return unweighted


def main() -> None:
    _python, _dash_m, module, *arguments = sys.argv[1:]
    with handicapped():
        run_module(module, arguments)


if __name__ == "__main__":
    main()
