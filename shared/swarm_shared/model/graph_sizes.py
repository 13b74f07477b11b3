"""How much of a microbatch's autograd graph fits into memory, and what is computed again instead.

Pure. A graph consists of the layers' graphs and of its ends (embedding, head, loss). For a layer
that is computed again in the backward pass only its input is kept (Chen et al. 2016, arXiv
1604.06174), and while it is computed again its graph takes as much as a kept one. All layers of a
stage are alike, so that a number of them says which: the first ones, whose turn in the backward
pass is the last, when the kept layers' graphs are free again (the order of KARMA, Wahib et al.
2020, arXiv 2008.11421).
"""

from __future__ import annotations

from dataclasses import dataclass

OFFLOADED_AT_WORK = 2
"""Layers on the device of those that wait in host memory: one is used while another is copied."""


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """The sizes in bytes of one microbatch's graph, measured once."""

    layers: int
    layer_bytes: int
    """What autograd keeps of one layer, its input included."""
    input_bytes: int
    """The input of a layer."""
    ends_bytes: int = 0
    """What it keeps of all that is no layer."""

    def graph_bytes(self, recomputed: int = 0, offloaded: int = 0) -> int:
        """Return the bytes of a graph between its passes, without so many first layers, which are
        computed again or wait in host memory."""
        kept = (self.layers - recomputed - offloaded) * self.layer_bytes
        return kept + recomputed * self.input_bytes + self.ends_bytes

    def working_bytes(self, recomputed: int = 0, offloaded: int = 0) -> int:
        """Return the bytes of a graph at the most, in one of its passes: a layer that is computed
        again, or copied beside another one, has the room of kept ones, which is free by then,
        unless there are too few."""
        kept = self.layers - recomputed - offloaded
        at_work = max(kept, OFFLOADED_AT_WORK if offloaded else min(1, recomputed))
        return self.graph_bytes(recomputed, offloaded) + (at_work - kept) * self.layer_bytes

    @property
    def least_working_bytes(self) -> int:
        """The least bytes with which a microbatch can be computed forward and backward."""
        return min(self.working_bytes(), self.working_bytes(self.layers))

    def fewest_recomputed(self, room_bytes: int, beside_bytes: int = 0) -> int | None:
        """Return the fewest layers that must be computed again for the graph to work within
        `room_bytes`, and to leave `beside_bytes` of them between its passes; None if no number
        does."""
        return next(
            (
                n
                for n in range(self.layers + 1)
                if self.working_bytes(n) <= room_bytes
                and self.graph_bytes(n) + beside_bytes <= room_bytes
            ),
            None,
        )
