"""Time series of bytes over every machine's link and of busy cores during a contender's run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Self

import numpy as np

from benchmarks.wan.links.network import Network, Sample

SAMPLE_SECONDS = 0.2


class Recorder:
    """Samples the counters in its own thread until the block ends."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._record, daemon=True)
        self.samples: list[Sample] = []

    def __enter__(self) -> Self:
        self.samples.append(self._network.sample())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _record(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.samples.append(self._network.sample())
        self.samples.append(self._network.sample())


def bytes_between(
    samples: Sequence[Sample], begin: float, end: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Return bytes (sent, received) of each machine between two Unix times."""
    at = [one.at for one in samples]
    return (
        {
            name: _growth(at, [one.sent[name] for one in samples], begin, end)
            for name in samples[0].sent
        },
        {
            name: _growth(at, [one.received[name] for one in samples], begin, end)
            for name in samples[0].received
        },
    )


def busy_cores(samples: Sequence[Sample], begin: float, end: float) -> float:
    """Return the mean number of busy cores of this computer, by any process."""
    at, busy = [one.at for one in samples], [one.busy_seconds for one in samples]
    return _growth(at, busy, begin, end) / (end - begin)


def _growth(at: Sequence[float], counts: Sequence[float], begin: float, end: float) -> float:
    """Return how much a counter grew, interpolated between samples and constant beyond them."""
    before, after = np.interp((begin, end), at, counts)
    return float(after - before)
