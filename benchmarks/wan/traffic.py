"""Time series of bytes over every machine's link and of busy cores during a contender's run."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from benchmarks.wan.network import Network, Sample

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
    at = [(_sent(samples, moment), _received(samples, moment)) for moment in (begin, end)]
    (sent_before, received_before), (sent_after, received_after) = at
    return (
        {name: sent_after[name] - sent_before[name] for name in sent_after},
        {name: received_after[name] - received_before[name] for name in received_after},
    )


def busy_cores(samples: Sequence[Sample], begin: float, end: float) -> float:
    """Return the mean number of busy cores of this computer, by any process."""
    times = [one.at for one in samples]
    counts = [{"busy": one.busy_seconds} for one in samples]
    first, last = (_interpolated(times, counts, moment)["busy"] for moment in (begin, end))
    return (last - first) / (end - begin)


def _sent(samples: Sequence[Sample], moment: float) -> dict[str, float]:
    return _interpolated([one.at for one in samples], [one.sent for one in samples], moment)


def _received(samples: Sequence[Sample], moment: float) -> dict[str, float]:
    return _interpolated([one.at for one in samples], [one.received for one in samples], moment)


def _interpolated(
    times: Sequence[float], counts: Sequence[Mapping[str, float]], moment: float
) -> dict[str, float]:
    """Interpolate between the two nearest samples; use the nearest one outside their range."""
    after = bisect_left(times, moment)
    if after == 0 or after == len(times):
        nearest = counts[0] if after == 0 else counts[-1]
        return {name: float(count) for name, count in nearest.items()}
    span = times[after] - times[after - 1]
    share = (moment - times[after - 1]) / span if span > 0 else 1.0
    return {
        name: counts[after - 1][name] + share * (count - counts[after - 1][name])
        for name, count in counts[after].items()
    }
