"""Records when a volunteer computes, sends and closes.

`benchmarks.instruments.inside` runs the program and writes the records. Seven methods are wrapped.
Times are those of the computer's monotonic clock, which all its processes share across network
namespaces.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from benchmarks.instruments.handicap import handicapped
from benchmarks.instruments.inside import run_inside, wrapped
from swarm_client.pipeline.downstream import Downstream, MicrobatchRequest
from swarm_client.stage.handle.slots import Output
from swarm_client.stage.handle.worker_handle import StageWorker
from swarm_client.volunteer.gradient_averager import GroupAverager

Method = Callable[..., Awaitable[Any]]


class Recorder:
    """Events of this process while `recording`: (what, stage, step, microbatch, begin, end,
    seconds computed)."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, int, int, float, float, float]] = []
        self._forwards: dict[tuple[int, int], tuple[int, int]] = {}
        """Step and microbatch by (stage, request) of the forward, for the backward."""

    def recording(self) -> AbstractContextManager[None]:
        return wrapped(
            (
                (StageWorker, StageWorker.forward, self._wrap_forward),
                (StageWorker, StageWorker.backward, self._wrap_backward),
                (StageWorker, StageWorker.prepare_round, self._wrap_closing("prepare")),
                (StageWorker, StageWorker.norm, self._wrap_closing("norm")),
                (StageWorker, StageWorker.apply, self._wrap_closing("apply")),
                (Downstream, Downstream.send, self._wrap_send),
                (GroupAverager, GroupAverager.reduce, self._wrap_reduce),
            )
        )

    def _note(
        self, what: str, stage: int, step: int, microbatch: int, began: float, seconds: float
    ) -> None:
        self.events.append((what, stage, step, microbatch, began, time.monotonic(), seconds))

    def _wrap_forward(self, forward: Method) -> Method:
        async def recorded(worker: StageWorker, step: int, microbatch: int, *rest: Any) -> Output:
            began = time.monotonic()
            output: Output = await forward(worker, step, microbatch, *rest)
            self._note("forward", worker.stage, step, microbatch, began, output.seconds)
            self._forwards[worker.stage, output.request] = (step, microbatch)
            return output

        return recorded

    def _wrap_backward(self, backward: Method) -> Method:
        async def recorded(worker: StageWorker, handle: Output, payload: Any) -> Output:
            step, microbatch = self._forwards.pop((worker.stage, handle.request))
            began = time.monotonic()
            output: Output = await backward(worker, handle, payload)
            self._note("backward", worker.stage, step, microbatch, began, output.seconds)
            return output

        return recorded

    def _wrap_closing(self, what: str) -> Callable[[Method], Method]:
        def wrap(method: Method) -> Method:
            async def recorded(worker: StageWorker, step: int, *rest: Any) -> Any:
                began = time.monotonic()
                done = await method(worker, step, *rest)
                self._note(what, worker.stage, step, -1, began, 0.0)
                return done

            return recorded

        return wrap

    def _wrap_reduce(self, reduce: Method) -> Method:
        async def recorded(
            averager: GroupAverager, worker: StageWorker, step: int, *rest: Any
        ) -> None:
            began = time.monotonic()
            await reduce(averager, worker, step, *rest)
            self._note("reduce", worker.stage, step, -1, began, 0.0)

        return recorded

    def _wrap_send(self, send: Method) -> Method:
        async def recorded(downstream: Downstream, parcel: MicrobatchRequest, *rest: Any) -> Any:
            began = time.monotonic()
            answer = await send(downstream, parcel, *rest)
            # Recorded under the destination stage.
            self._note("send", downstream.stage, parcel.step, parcel.microbatch, began, 0.0)
            return answer

        return recorded


def main(words: Sequence[str]) -> None:
    recorder = Recorder()
    with handicapped():
        run_inside(words, recorder.recording(), lambda module: recorder.events)


if __name__ == "__main__":
    main(sys.argv[1:])
