"""The stage worker at the pace that PACE_VARIABLE sets; started in its place by a volunteer that
runs under `benchmarks.instruments.handicap`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.instruments.inside import run_module, wrapped
from benchmarks.instruments.pace import pace_from_environment
from swarm_client.stage.handle.warm_worker import WORKER_MODULE
from swarm_client.stage.worker.stage_runner import BackwardResult, StageRunner

Method = Callable[..., Any]

PART_OF_WORK = 1 / 3
"""A forward, the gradients of inputs and those of weights are as much work."""


def paced(share_of: Callable[[Any], float]) -> Callable[[Method], Method]:
    """Make a computation take its share of a microbatch's time, given its result."""

    def wrap(compute: Method) -> Method:
        def slowed(runner: StageRunner, *arguments: Any) -> Any:
            cut = runner.manifest.stages[runner.stage_index]
            pace = pace_from_environment(cut.work_flops, time.perf_counter)
            started = time.perf_counter()
            result = compute(runner, *arguments)
            pace.keep(started, share_of(result))
            return result

        return slowed

    return wrap


def backward_share(result: BackwardResult) -> float:
    """The share of a backward pass: without the weights' gradients, if these are owed."""
    return PART_OF_WORK if result.owed is not None else 2 * PART_OF_WORK


def forward_share(result: object) -> float:
    """The share of a forward; on the last stage the backward pass is part of it."""
    return PART_OF_WORK + (backward_share(result) if isinstance(result, BackwardResult) else 0.0)


def main() -> None:
    with wrapped(
        [
            (StageRunner, StageRunner.forward, paced(forward_share)),
            (StageRunner, StageRunner.backward, paced(backward_share)),
            (StageRunner, StageRunner.count_weights, paced(lambda _: PART_OF_WORK)),
        ]
    ):
        run_module(WORKER_MODULE, sys.argv[1:])


if __name__ == "__main__":
    main()
