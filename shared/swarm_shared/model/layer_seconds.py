"""How long a microbatch takes when some layers' graphs are computed again, or wait in host memory.

Pure. A device computes, and beside it one engine copies to the host and another one back. Copies
take no time of their own unless something waits for them (the cost model of KARMA, Wahib et al.
2020, arXiv 2008.11421, section 3, with both engines followed event by event).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

MICROBATCHES = 6
"""So many are followed, as copies of one hide behind computations of another."""


class GraphPlace(Enum):
    """Where the graph of a layer is between its passes."""

    KEPT = auto()
    AGAIN = auto()
    """Nowhere: the layer is computed again."""
    COPIED = auto()
    """In host memory."""


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """What one layer takes. A backward pass takes twice as long as a forward pass."""

    forward: float
    copy: float
    """Of the layer's graph to host memory, or back."""

    def microbatch(self, graphs: Sequence[GraphPlace]) -> float:
        """Return the seconds of a microbatch with these graphs, where each one's backward pass
        follows the forward pass of the next one."""
        device = _Device(graphs, self)
        device.forward(0)
        for number in range(MICROBATCHES):
            device.forward(number + 1)
            device.backward(number)
        return device.now / MICROBATCHES

    def copied_layers(self, layers: int, not_kept: int) -> int:
        """Return how many of so many layers that are not kept should be copied."""

        def seconds(copied: int) -> float:
            return self.microbatch(places(layers, not_kept, copied))

        return min(range(not_kept + 1), key=lambda copied: (seconds(copied), copied))


def places(layers: int, not_kept: int, copied: int) -> tuple[GraphPlace, ...]:
    """Return where the layers' graphs are if the first ones are not kept, and the very first ones
    are copied: their copies hide behind the layers that are computed again."""
    again = (GraphPlace.AGAIN,) * (not_kept - copied)
    kept = (GraphPlace.KEPT,) * (layers - not_kept)
    return (*(GraphPlace.COPIED,) * copied, *again, *kept)


class _Device:
    """A device that computes microbatches. At most two layers are on their way to the host, and one
    is fetched ahead."""

    def __init__(self, graphs: Sequence[GraphPlace], seconds: LayerSeconds) -> None:
        self._graphs, self._seconds = graphs, seconds
        self._copied = [at for at, one in enumerate(graphs) if one is GraphPlace.COPIED]
        self.now = self._out_free = self._in_free = 0.0
        self._gone: dict[tuple[int, int], float] = {}
        """By microbatch and layer: the end of the copy to the host."""
        self._there: dict[tuple[int, int], float] = {}
        """The end of the copy back."""

    def forward(self, microbatch: int) -> None:
        for at in range(len(self._graphs)):
            if at in self._copied[2:]:
                before = self._copied[self._copied.index(at) - 2]
                self.now = max(self.now, self._gone[microbatch, before])
            self.now += self._seconds.forward
            if at in self._copied:
                self._out_free = max(self._out_free, self.now) + self._seconds.copy
                self._gone[microbatch, at] = self._out_free

    def backward(self, microbatch: int) -> None:
        for at in reversed(range(len(self._graphs))):
            if at in self._copied:
                self._fetch((microbatch, at))
                self.now = max(self.now, self._there[microbatch, at])
            below = [layer for layer in self._copied if layer < at]
            if below:
                self._fetch((microbatch, below[-1]))
            passes = 3 if self._graphs[at] is GraphPlace.AGAIN else 2
            self.now += passes * self._seconds.forward

    def _fetch(self, key: tuple[int, int]) -> None:
        if key not in self._there:
            began = max(self.now, self._in_free, self._gone[key])
            self._there[key] = self._in_free = began + self._seconds.copy
