"""A processor with the copy engine of an accelerator, as far as time is concerned.

What is computed and copied is the processor's own. A copy is done at once, but counts as done only
when an engine that copies at a given rate, one copy after the other, would have done it; a
computation that needs it waits until then. So copies hide behind computations as on a device. The
time in which the processor itself copies is not on its clock, since it is the engine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swarm_client.stage.worker.accelerator import Accelerator, processor

T = TypeVar("T")


class ComputingClock:
    """The seconds in which the processor does not copy."""

    def __init__(self) -> None:
        self._copying_seconds = 0.0

    def now(self) -> float:
        return time.perf_counter() - self._copying_seconds

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Stop the clock."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._copying_seconds += time.perf_counter() - began


class ThrottledStreams:
    """A stream that computes, which the host waits for, and streams that copy."""

    def __init__(self, bytes_per_second: float) -> None:
        self.clock = ComputingClock()
        self._bytes_per_second = bytes_per_second
        self._computing = self.stream()
        self.current = self._computing

    def stream(self) -> ThrottledStream:
        return ThrottledStream(self._bytes_per_second, self.clock)

    def event(self) -> ThrottledEvent:
        return ThrottledEvent(self)

    def computing(self) -> ThrottledStream:
        return self._computing

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        self.current = stream
        try:
            with _Copies(stream):
                yield
        finally:
            self.current = self._computing

    def used_by(self, tensor: Tensor, stream: Any) -> None:
        pass

    def pinned(self, nbytes: int) -> Tensor:
        # Of numpy's memory: what counts tensors counts those of the device.
        return torch.from_numpy(np.empty(nbytes, dtype=np.uint8))

    def in_background(self, work: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()
        done.set_result(work())
        return done


class ThrottledStream:
    """Copies one after the other."""

    def __init__(self, bytes_per_second: float, clock: ComputingClock) -> None:
        self.clock = clock
        self._bytes_per_second = bytes_per_second
        self._busy_until = 0.0

    def done_at(self) -> float:
        """When all copies are done."""
        return max(self._busy_until, self.clock.now())

    def copy(self, nbytes: int) -> None:
        self._busy_until = self.done_at() + nbytes / self._bytes_per_second

    def wait_event(self, event: ThrottledEvent) -> None:
        event.synchronize()

    def wait_stream(self, other: ThrottledStream) -> None:
        pass


class ThrottledEvent:
    def __init__(self, streams: ThrottledStreams) -> None:
        self._streams = streams
        self._moment = 0.0

    def record(self) -> None:
        self._moment = self._streams.current.done_at()

    def synchronize(self) -> None:
        time.sleep(max(0.0, self._moment - self._streams.clock.now()))


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts every copy on a stream."""

    def __init__(self, stream: ThrottledStream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self._stream.copy(args[1].nbytes)
        with self._stream.clock.copying():
            return func(*args, **(kwargs or {}))


def throttled_processor(bytes_per_second: float) -> tuple[Accelerator, ComputingClock]:
    """Return the processor with copies at this rate, and its clock."""
    accelerator, streams = processor(), ThrottledStreams(bytes_per_second)
    accelerator.streams = streams
    return accelerator, streams.clock
