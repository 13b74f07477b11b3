"""What a worker keeps of graphs, against the plan that is made before it computes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.run.test_graph_sizes import least_room, sizes_strategy
from swarm_client.stage.worker.backward_pass import Graph
from swarm_client.stage.worker.flights import InFlight
from swarm_client.stage.worker.graph_memory import GraphMemory
from swarm_shared.base.types import MicrobatchIndex, Step
from swarm_shared.run.graph_sizes import GRAPHS, GraphSizes

MICROBATCHES = 12


@given(sizes_strategy, st.integers(0, 900))
def test_a_worker_computes_as_many_layers_again_as_planned(sizes: GraphSizes, more: int) -> None:
    budget_bytes = least_room(sizes) + more
    in_flight: dict[int, InFlight] = {}
    graphs = GraphMemory(budget_bytes, in_flight, {})
    graphs.measured = sizes
    recomputed: list[int] = []
    for number in range(MICROBATCHES):
        found = graphs.layers_to_recompute()
        assert found is not None
        recomputed.append(found)
        graph = Graph(None, torch.empty(0), found)
        in_flight[number] = InFlight(
            Step(1), MicrobatchIndex(number), True, None, bytearray(), None, graph
        )
        if number >= GRAPHS - 1:
            oldest = in_flight.pop(number - GRAPHS + 1).graph
            assert oldest is not None
            graphs.make_room(sizes.working_bytes(oldest.recomputed_layers))
            assert all(flight.graph is not None for flight in in_flight.values())
    planned = GRAPHS * sizes.recomputed_layers(budget_bytes, is_last=False)
    assert sum(recomputed[:GRAPHS]) == planned
    # An input more or less may tip the balance later.
    assert abs(sum(recomputed[-GRAPHS:]) - planned) <= 1
