"""How much of a microbatch's autograd graph fits into memory, and what is computed again instead.

Pure. A graph consists of the layers' graphs and of its ends (embedding, head, loss). For a layer
that is computed again in the backward pass only its input is kept (Chen et al. 2016, arXiv
1604.06174), and while it is computed again its graph takes as much as a kept one. All layers of a
stage are alike, so that a number of them says which: the first ones, whose turn in the backward
pass is the last, when the kept layers' graphs are free again (the order of KARMA, Wahib et al.
2020, arXiv 2008.11421).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

GRAPHS = 2
"""Microbatches whose autograd graph a peer has in memory: one waits for its gradient while another
one is computed. The last stage has one at a time, whose backward pass follows at once."""

OFFLOADED_AT_WORK = 2
"""Layers on the device of those that wait in host memory: one is used while another is copied."""


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """The sizes in bytes of one microbatch's graph: as a worker has measured them, or before that
    those of the profile."""

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

    def recomputed_beside(
        self, room_bytes: int, others: Collection[tuple[int, int]],
        copying_budget_bytes: int | None = None,
    ) -> int | None:  # fmt: skip
        """Return the fewest layers that must be computed again for a graph to fit into what the
        graphs in flight leave, beside the passes of these; None if no number does.

        The first one leaves, if possible, room for another microbatch with the inputs of its
        layers: they save a whole forward pass, a kept layer saves its own. Where layers may wait in
        host memory instead, within a budget for all graphs, each one leaves room of it for a
        microbatch whose layers all wait there. `others` has the layers of each graph in flight that
        are computed again, and that wait.
        """
        beside_bytes = self.least_working_bytes
        if others:
            beside_bytes = max(
                self.working_bytes(*other) - self.graph_bytes(*other) for other in others
            )
        besides = [beside_bytes, 0]
        if copying_budget_bytes is not None:
            # It takes the inputs of its layers at first, as if they were computed again.
            least_bytes = max(self.least_working_bytes, self.working_bytes(0, self.layers))
            most_bytes = copying_budget_bytes - least_bytes
            besides.insert(0, max(beside_bytes, room_bytes - most_bytes))
        found = (self.fewest_recomputed(room_bytes, beside) for beside in besides)
        return next((number for number in found if number is not None), None)

    def recomputed_layers(self, budget_bytes: int, is_last: bool) -> float:
        """Return how many layers of a microbatch a worker computes again, on average over those
        whose graphs it has at once; all of one whose graph is not kept."""
        if is_last:
            found = self.fewest_recomputed(budget_bytes)
            return self.layers if found is None else found
        kept: list[int] = []
        for _ in range(GRAPHS):
            room_bytes = budget_bytes - sum(map(self.graph_bytes, kept))
            found = self.recomputed_beside(room_bytes, [(number, 0) for number in kept])
            if found is not None:
                kept.append(found)
        return (sum(kept) + (GRAPHS - len(kept)) * self.layers) / GRAPHS
