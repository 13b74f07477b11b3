"""What a worker keeps of graphs, against the plan that is made before it computes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kits.client.shared_machine import TOTAL_BYTES, SharedMachine
from kits.client.stage_runners import (
    CPU,
    PLENTY,
    STEP,
    make_manifest,
    runners_of,
    through,
    tokens_of,
    wire,
)
from shared.run.test_graph_sizes import least_room, sizes_strategy
from shared.scheduling.placement.test_memory_need import honest_manifest
from swarm_client.stage.handle.warm_worker import KEEP_FREED_MEMORY, TUNABLES
from swarm_client.stage.worker.accelerator import LEFT_FREE_BYTES
from swarm_client.stage.worker.backward_pass import Graph
from swarm_client.stage.worker.flights import InFlight
from swarm_client.stage.worker.graph_memory import GraphMemory
from swarm_client.stage.worker.stage_runner import StageRunner
from swarm_shared.base.memory import MemoryOffer
from swarm_shared.base.types import MicrobatchIndex, StageIndex
from swarm_shared.model.layer_seconds import LayerSeconds
from swarm_shared.run.graph_sizes import GRAPHS, GraphSizes
from swarm_shared.run.model_config import ModelConfig
from swarm_shared.scheduling.placement.memory_plan import memory_plan, stage_needs

MICROBATCHES = 8
MODEL = ModelConfig(
    vocabulary_size=64, hidden_size=32, intermediate_size=64, layers=12, heads=4,
    key_value_heads=2, sequence_length=16,
)  # fmt: skip


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
            STEP, MicrobatchIndex(number), True, None, bytearray(), None, graph
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


@given(sizes_strategy, st.integers(0, 900))
@example(GraphSizes(layers=5, layer_bytes=20, input_bytes=6, ends_bytes=0), 0)
def test_microbatches_in_flight_compute_nothing_again_where_all_their_layers_may_wait(
    sizes: GraphSizes, more: int
) -> None:
    # Both may be in a pass, beside the inputs of the layers that are not kept.
    inputs_bytes = sizes.layers * sizes.input_bytes
    budget_bytes = GRAPHS * (sizes.working_bytes(0, sizes.layers) + inputs_bytes) + more
    in_flight: dict[int, InFlight] = {}
    graphs = GraphMemory(budget_bytes, in_flight, {})
    graphs.measured, graphs.host_bytes = sizes, 2**40
    graphs.seconds = LayerSeconds(forward=1.0, copy=0.1)
    for number in range(MICROBATCHES):
        not_kept = graphs.layers_to_recompute()
        assert not_kept is not None
        waiting = graphs.offloaded_of(not_kept)
        assert waiting == not_kept
        graph = Graph(None, torch.empty(0), 0, waiting)
        in_flight[number] = InFlight(
            STEP, MicrobatchIndex(number), True, None, bytearray(), None, graph
        )
        if number >= GRAPHS - 1:
            oldest = in_flight.pop(number - GRAPHS + 1).graph
            assert oldest is not None, "no pass has taken its room"
            graphs.make_room(sizes.working_bytes(0, oldest.offloaded_layers))
            assert all(flight.graph is not None for flight in in_flight.values())


@pytest.mark.parametrize("share", [0.0, 0.3, 0.75])
def test_the_plan_by_the_profile_is_about_what_a_worker_does_by_what_it_measures(
    share: float,
) -> None:
    torch.set_num_threads(1)
    manifest, middle = honest_manifest(MODEL, 2, 3), StageIndex(1)
    needs = stage_needs(manifest, middle)
    memory = needs.memory
    spare = int(share * (memory.comfortable_bytes - memory.device_bytes))
    offer = MemoryOffer(device_bytes=memory.device_bytes + spare, host_bytes=memory.host_bytes)
    budget_bytes = offer.graph_bytes(memory, needs.parameter_memory)
    runner = StageRunner(manifest, middle, CPU, budget_bytes, 0)
    runner.warm_up()
    recomputed: list[int] = []
    for number in range(MICROBATCHES):
        payload = wire(torch.ones(2, 16, 32))
        runner.forward(number, STEP, MicrobatchIndex(number), True, payload)
        graph = runner._in_flight[number].graph
        recomputed.append(needs.layers if graph is None else graph.recomputed_layers)
        if number >= GRAPHS - 1:
            runner.backward(number - GRAPHS + 1, payload)
    # A measured graph is some inputs of layers larger than a profile's.
    average = sum(recomputed[-GRAPHS:]) / GRAPHS
    assert memory_plan(offer, needs).recomputed_layers == pytest.approx(average, abs=0.5)


def test_graphs_take_none_of_the_memory_that_other_programs_need_and_change_no_bit() -> None:
    manifest, machine = make_manifest(stages=2), SharedMachine()
    runners = [StageRunner(manifest, StageIndex(i), machine, PLENTY, PLENTY) for i in (0, 1)]
    plenty, first = runners_of(manifest), runners[0]
    assert through(runners, 0).loss_sum == through(plenty, 0).loss_sum  # measures the graphs

    def keeps_graph_of(microbatch: int) -> bool:
        inputs, _ = tokens_of(manifest, microbatch)
        first.forward(100 + microbatch, STEP, MicrobatchIndex(microbatch), True, wire(inputs))
        return first._in_flight[100 + microbatch].graph is not None

    assert keeps_graph_of(1)
    assert machine.releases == 0
    machine.free_bytes = LEFT_FREE_BYTES - 1
    assert not keeps_graph_of(2)
    assert first._in_flight[101].graph is None, "what does not fit is dropped at once"
    assert machine.releases == 1
    assert through(runners, 3).loss_sum == through(plenty, 3).loss_sum
    machine.free_bytes = TOTAL_BYTES
    assert keeps_graph_of(4)
    assert keeps_graph_of(5)
    for one, other in zip(runners, plenty, strict=True):
        assert torch.equal(one.accumulator.totals(), other.accumulator.totals())
    machine.free_bytes = 0
    first.backward(104, wire(torch.zeros(2, 16, 32)))
    assert first._in_flight[105].graph is None


def test_graphs_keep_to_an_offer_that_changes_and_change_no_bit() -> None:
    manifest, machine = make_manifest(stages=2), SharedMachine()
    runners = [StageRunner(manifest, StageIndex(i), machine, PLENTY, PLENTY) for i in (0, 1)]
    plenty, first = runners_of(manifest), runners[0]
    assert through(runners, 0).loss_sum == through(plenty, 0).loss_sum  # measures the graphs

    def start(microbatch: int) -> None:
        inputs, _ = tokens_of(manifest, microbatch)
        first.forward(100 + microbatch, STEP, MicrobatchIndex(microbatch), True, wire(inputs))

    def kept() -> list[int]:
        return [number - 100 for number, one in first._in_flight.items() if one.graph is not None]

    for microbatch in (1, 2, 3):
        start(microbatch)
    assert kept() == [1, 2, 3]
    used = PLENTY - first.graphs.room_bytes()
    first.limit_memory(None, used - 1, 0)
    assert kept() == [1, 2], "the newest is computed last"
    assert machine.releases == 1
    first.limit_memory(None, used - 1, 0)
    assert machine.releases == 1, "nothing is given back twice"
    start(4)
    assert first.graphs.room_bytes() >= 0, "less is kept of it"
    assert first.graphs.keep_less()
    left = first.graphs.budget_bytes
    first.limit_memory(None, used - 1, 0)
    assert first.graphs.budget_bytes == left, "a shortage outlives other limits"
    first.limit_memory(None, 2 * PLENTY, 0)
    assert first.graphs.budget_bytes == PLENTY, "the system bounds the process by its first offer"
    start(5)
    assert kept() == [5]
    assert through(runners, 6).loss_sum == through(plenty, 6).loss_sum
    for one, other in zip(runners, plenty, strict=True):
        assert torch.equal(one.accumulator.totals(), other.accumulator.totals())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no glibc")
def test_what_is_given_back_is_free_for_other_programs() -> None:
    """Blocks of the allocator's heap, under the settings of a worker."""
    program = """
import psutil, torch
from swarm_client.stage.worker.accelerator import release_cached
blocks = [torch.ones(2**20, dtype=torch.uint8) for _ in range(256)]
last = torch.ones(2**20, dtype=torch.uint8)  # the heap does not shrink below it by itself
del blocks
before = psutil.Process().memory_info().rss
release_cached()
print((before - psutil.Process().memory_info().rss) // 2**20)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, TUNABLES: KEEP_FREED_MEMORY},
    )  # fmt: skip
    assert int(done.stdout) > 200
