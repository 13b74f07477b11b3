"""The memory that autograd graphs may take between the passes, and what is kept of each within it.

Owns the budget. Counts the graphs in flight and what is owed; both are the runner's
(`swarm_client.stage.worker.stage_runner`). The arithmetic of one graph is
`swarm_shared.run.graph_sizes`.

The budget is what was free when the stage was taken. In the host's memory other programs may take
it later, and allocations do not fail: the system slows down or ends a program instead. So what is
free is measured before every computation, and no more than that is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from torch import Tensor

from swarm_client.stage.worker.accelerator import Accelerator
from swarm_client.stage.worker.backward_pass import Graph
from swarm_client.stage.worker.flights import InFlight, OwedWeights
from swarm_shared.model.layer_seconds import LayerSeconds
from swarm_shared.run.graph_sizes import GRAPHS, GraphSizes

KEPT_WHEN_SHORT = 0.75
"""Fraction of the memory of graphs that is kept when an allocation fails."""

KEPT_AGAIN = 1.125
"""Factor by which it grows in every step after that, up to what is offered."""


class GraphMemory:
    """The graphs of one runner."""

    def __init__(
        self, budget_bytes: int, in_flight: Mapping[int, InFlight],
        owed: Mapping[int, OwedWeights], host: Accelerator | None = None, host_bytes: int = 0,
    ) -> None:  # fmt: skip
        """`host`: the device, if it computes in the host's memory; `host_bytes`: the memory of the
        host for graphs of a device that has its own."""
        self.budget_bytes = self._offered_bytes = self._first_bytes = budget_bytes
        self._host = host
        self._limit_bytes = budget_bytes
        self.measured: GraphSizes | None = None
        """Known after the first computation with a graph."""
        self.seconds: LayerSeconds | None = None
        """Known where graphs may wait in host memory."""
        self.host_bytes = host_bytes
        self._in_flight, self._owed = in_flight, owed

    @property
    def sizes(self) -> GraphSizes:
        """The sizes, once they are measured."""
        if self.measured is None:
            raise RuntimeError("no graph has been measured yet")
        return self.measured

    def offer(self, budget_bytes: int, host_bytes: int) -> bool:
        """Replace the memory that graphs may take from now on; graphs that do not fit are dropped.
        Returns whether it is less than before.

        In the host's memory it is never more than at the start: the operating system limits the
        process by that.
        """
        self.host_bytes = host_bytes
        if self._host is not None:
            budget_bytes = min(budget_bytes, self._first_bytes)
        before_bytes = self._offered_bytes
        if budget_bytes != before_bytes:  # an unchanged offer does not end a shortage
            self.budget_bytes = self._offered_bytes = self._limit_bytes = budget_bytes
            if self.measured is not None:
                self.make_room(0)
        return budget_bytes < before_bytes

    def measure_free(self) -> None:
        """Measure how much of the budget is free at the moment; drop graphs that do not fit any
        more."""
        self._limit_bytes = self.budget_bytes
        if self._host is None or self.measured is None:
            return
        self._limit_to(self._host.spare_bytes())
        is_less = self._limit_bytes < self.budget_bytes
        if is_less and self.room_bytes() < self.measured.working_bytes():
            self.make_room(0)
            # The allocator keeps what was freed, and other programs cannot have it.
            self._host.release_cached()
            self._limit_to(self._host.spare_bytes())

    def _limit_to(self, spare_bytes: int) -> None:
        available_bytes = self._used_bytes() + spare_bytes
        self._limit_bytes = min(self.budget_bytes, max(0, available_bytes))

    def room_bytes(self) -> int:
        """Return the bytes that the graphs in flight leave of what was free at the last
        measurement."""
        return self._limit_bytes - self._used_bytes()

    def _used_bytes(self) -> int:
        graphs_bytes = sum(
            self.sizes.graph_bytes(graph.recomputed_layers, graph.offloaded_layers)
            for graph in self._graphs()
        )
        owed_bytes = sum(owed.nbytes for owed in self._owed.values())
        return graphs_bytes + owed_bytes

    def _graphs(self) -> list[Graph]:
        return [flight.graph for flight in self._in_flight.values() if flight.graph is not None]

    def offloaded_of(self, not_kept: int) -> int:
        """Return how many of so many first layers should wait in host memory instead of being
        computed again, as their time and both memories allow."""
        if self.seconds is None or self.measured is None:
            return 0
        sizes = self.measured
        waiting = sum(graph.offloaded_layers for graph in self._graphs())
        room = self.host_bytes // max(1, sizes.layer_bytes) - waiting
        offloaded = min(self._copied_layers(self.seconds, sizes.layers, not_kept), room)
        fits = sizes.working_bytes(not_kept - offloaded, offloaded) <= self.room_bytes()
        return offloaded if offloaded > 0 and fits else 0

    @staticmethod
    @cache
    def _copied_layers(seconds: LayerSeconds, layers: int, not_kept: int) -> int:
        return seconds.copied_layers(layers, not_kept)

    def make_room(self, wanted_bytes: int) -> None:
        """Drop graphs in flight, the newest first, until so many bytes are free or none is left."""
        for flight in reversed(list(self._in_flight.values())):
            if self.room_bytes() >= wanted_bytes:
                return
            flight.graph = None

    @property
    def is_short(self) -> bool:
        """Whether what is owed leaves less memory than a forward's graph takes, with room for
        another microbatch: less would be kept of the graph."""
        if not self._owed:
            return False
        sizes = self.sizes
        return self.room_bytes() < sizes.working_bytes() + sizes.least_working_bytes

    def layers_to_recompute(self) -> int | None:
        """Return the fewest layers that must be computed again for a further graph to fit; None if
        no number does."""
        graphs_in_flight = [
            (graph.recomputed_layers, graph.offloaded_layers) for graph in self._graphs()
        ]
        budget_bytes = self.budget_bytes if self._may_copy() else None
        return self.sizes.recomputed_beside(self.room_bytes(), graphs_in_flight, budget_bytes)

    def _may_copy(self) -> bool:
        """Whether all layers of two microbatches could wait in host memory, and should rather than
        be computed again."""
        if self.seconds is None:
            return False
        sizes = self.sizes
        has_room = self.host_bytes >= GRAPHS * sizes.layers * sizes.layer_bytes
        return has_room and self._copied_layers(self.seconds, sizes.layers, sizes.layers) > 0

    def may_owe(self, graph: Graph, parameters: Iterable[Tensor]) -> bool:
        """Whether a backward pass may leave the gradients of weights for later. What is kept for
        them is at most as large as the graph, in which every factor has its like, and the gradients
        of the other parameters."""
        tape, sizes = graph.tape, self.sizes
        if tape is None or tape.only_of_host:
            return False
        direct_bytes = sum(parameter.nbytes for parameter in parameters if parameter not in tape)
        return self.room_bytes() >= sizes.working_bytes() + sizes.graph_bytes() + direct_bytes

    def keep_less(self) -> bool:
        """Keep less of graphs from now on, as memory was short; those in flight are dropped. False
        if as little is kept as can be."""
        if self.measured is None:
            return False
        sizes, budget_bytes = self.measured, self.budget_bytes
        if budget_bytes <= sizes.least_working_bytes:
            return False
        taken_bytes = self._used_bytes() + sizes.working_bytes()
        less_bytes = int(KEPT_WHEN_SHORT * min(budget_bytes, taken_bytes))
        self.budget_bytes = max(sizes.least_working_bytes, less_bytes)
        self._limit_bytes = min(self._limit_bytes, self.budget_bytes)
        for flight in self._in_flight.values():
            flight.graph = None
        return True

    def keep_more(self) -> None:
        """Try after a step whether the memory that was short is there again."""
        more_bytes = int(self.budget_bytes * KEPT_AGAIN)
        self.budget_bytes = min(self._offered_bytes, more_bytes)
        self.measure_free()
