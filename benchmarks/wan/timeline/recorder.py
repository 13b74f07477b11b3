"""Writes down when a volunteer computes, sends and closes.

    python -m benchmarks.wan.timeline.recorder FOLDER PYTHON -m MODULE WORDS...

runs MODULE with WORDS in this process, as PYTHON -m would, and writes FOLDER/PID.json at its end.
The program is not changed: six methods are wrapped. Times are the machine's monotonic clock, which
all its processes share, whatever network namespace they are in.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm_client.engine.downstream import Downstream, Parcel
from swarm_client.worker.client import StageWorker
from swarm_client.worker.output import Output

Method = Callable[..., Awaitable[Any]]


class Recorder:
    """What this process did while `recording`: (what, stage, step, microbatch, begin, end,
    seconds computed)."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, int, int, float, float, float]] = []
        self._forwards: dict[tuple[int, int], tuple[int, int]] = {}
        """(stage, request) of a forward → step and microbatch, for its backward."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        wrapped: Sequence[tuple[type, str, Callable[[Method], Method]]] = (
            (StageWorker, "forward", self._wrap_forward),
            (StageWorker, "backward", self._wrap_backward),
            (StageWorker, "prepare_round", self._wrap_closing("prepare")),
            (StageWorker, "norm", self._wrap_closing("norm")),
            (StageWorker, "apply", self._wrap_closing("apply")),
            (Downstream, "send", self._wrap_send),
        )
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in wrapped]
        for owner, name, wrap in wrapped:
            setattr(owner, name, wrap(getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

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

    def _wrap_send(self, send: Method) -> Method:
        async def recorded(downstream: Downstream, parcel: Parcel, *rest: Any) -> Any:
            began = time.monotonic()
            answer = await send(downstream, parcel, *rest)
            # By the stage that it goes to.
            self._note("send", downstream.stage, parcel.step, parcel.microbatch, began, 0.0)
            return answer

        return recorded


def main(words: Sequence[str]) -> None:
    folder, module, arguments = Path(words[0]), words[3], words[4:]
    recorder = Recorder()

    def write() -> None:
        (folder / f"{os.getpid()}.json").write_text(json.dumps(recorder.events) + "\n")

    atexit.register(write)
    sys.argv = [module, *arguments]
    with recorder.recording():
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
