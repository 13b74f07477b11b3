"""A processor with the copy engine of an accelerator, as far as time is concerned.

What is computed and copied is the processor's own. A copy is done at once, but counts as done only
when an engine that copies at a given rate, one copy after the other, would have done it; a
computation that needs it waits until then. So copies hide behind computations as on a device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swarm_client.stage.worker.accelerator import Accelerator, processor


class ThrottledStreams:
    """Two streams: computing, which the host waits for, and copying."""

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.busy_until = 0.0
        """When the engine has done all copies, on the clock of `time.perf_counter`."""
        self.is_copying = False

    def stream(self) -> ThrottledStream:
        return ThrottledStream()

    def event(self) -> ThrottledEvent:
        return ThrottledEvent(self)

    def computing(self) -> ThrottledStream:
        return ThrottledStream()

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        self.is_copying = True
        with _Copies(self):
            yield
        self.is_copying = False

    def used_by(self, tensor: Tensor, stream: Any) -> None:
        pass

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copied(self, nbytes: int) -> None:
        began = max(self.busy_until, time.perf_counter())
        self.busy_until = began + nbytes / self.bytes_per_second


class ThrottledEvent:
    def __init__(self, streams: ThrottledStreams) -> None:
        self._streams = streams
        self._moment = 0.0

    def record(self) -> None:
        streams = self._streams
        self._moment = streams.busy_until if streams.is_copying else time.perf_counter()

    def synchronize(self) -> None:
        time.sleep(max(0.0, self._moment - time.perf_counter()))


class ThrottledStream:
    def wait_event(self, event: ThrottledEvent) -> None:
        event.synchronize()

    def wait_stream(self, other: ThrottledStream) -> None:
        pass


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells the engine of every copy."""

    def __init__(self, streams: ThrottledStreams) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._streams = streams

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._streams.copied(args[1].nbytes)
        return func(*args, **(kwargs or {}))


def throttled_processor(bytes_per_second: float) -> Accelerator:
    """Return the processor, with copies at this rate."""
    accelerator = processor()
    accelerator.streams = ThrottledStreams(bytes_per_second)
    return accelerator
