"""The planner against brute force."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.memory import WORK
from swarm_shared.base.errors import CapacityError, ConfigurationError
from swarm_shared.base.memory import MemoryOffer, StageMemory
from swarm_shared.base.types import MAX_EXACT_INTEGER
from swarm_shared.model.profile import profile_layers
from swarm_shared.run.graph_sizes import GraphSizes
from swarm_shared.run.manifest import StageRange
from swarm_shared.run.model_config import PRESETS
from swarm_shared.run.stage_cut import (
    LayerMatrices,
    ModelProfile,
    PartProfile,
    StageCost,
    flops_cost,
    graph_sizes,
    parameter_memory,
    plan_stages,
    stage_memory,
    stage_profile,
)

counts = st.integers(0, MAX_EXACT_INTEGER)
parts = st.builds(
    PartProfile,
    flops=st.integers(0, 20),
    parameters=st.integers(0, 20),
    saved_activation_bytes=st.integers(0, 200),
)


@st.composite
def profiles(draw) -> ModelProfile:
    embedding, head = draw(parts), draw(parts)
    tied = min(embedding.parameters, head.parameters) if draw(st.booleans()) else 0
    layers = tuple(draw(st.lists(parts, min_size=1, max_size=8)))
    return ModelProfile(embedding, layers, head, tied, draw(st.integers(0, 100)))


def uniform(layers: int, embedding_flops: int = 0, head_flops: int = 0) -> ModelProfile:
    layer = PartProfile(10, 100, 50)
    return ModelProfile(
        PartProfile(embedding_flops, 500, 1),
        (layer,) * layers,
        PartProfile(head_flops, 500, 20),
        0,
        8,
    )


def cuts(layers: int, stages: int):
    """Every way of cutting, by the rule that the module states in words."""
    for inner in combinations_with_replacement(range(layers + 1), stages - 1):
        ends = (*inner, layers)
        starts = (0, *inner)
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        needed = [
            0 if layers < stages and index in (0, stages - 1) else 1 for index in range(stages)
        ]
        if all(length >= least for length, least in zip(lengths, needed, strict=True)):
            yield tuple(
                StageRange(first_layer=start, end_layer=end)
                for start, end in zip(starts, ends, strict=True)
            )


def worst_cost(profile: ModelProfile, plan, cost: StageCost) -> float:
    last = len(plan) - 1
    return max(
        cost(stage_profile(profile, cut, at == 0, at == last), at == 0, at == last)
        for at, cut in enumerate(plan)
    )


def memories(profile: ModelProfile, plan, staleness: int) -> list[StageMemory]:
    last = len(plan) - 1
    return [
        stage_memory(profile, cut, at == 0, at == last, staleness) for at, cut in enumerate(plan)
    ]


def worst_memory(profile: ModelProfile, plan, staleness: int) -> int:
    return max(
        memory.comfortable_bytes + memory.host_bytes
        for memory in memories(profile, plan, staleness)
    )


def costly_lines(part: PartProfile, is_first: bool, is_last: bool) -> float:
    """Border and parameters cost as well, each as much as some layers."""
    return max(part.flops, 15 * (2 - is_first - is_last)) + 3 * part.parameters


@settings(max_examples=300, deadline=None)
@given(
    profile=profiles(), stages=st.integers(1, 10), staleness=st.integers(0, 1),
    cost=st.sampled_from([flops_cost, costly_lines]),
    offer=st.none()
    | st.builds(
        MemoryOffer, device_bytes=st.integers(0, 4000), host_bytes=st.none() | st.integers(0, 4000)
    ),
)  # fmt: skip
def test_no_cut_that_fits_is_cheaper_or_as_cheap_and_smaller(
    profile, stages, staleness, cost, offer
):
    if stages > len(profile.layers) + 2:
        with pytest.raises(ConfigurationError):
            plan_stages(profile, stages)
        return
    fitting = [
        plan
        for plan in cuts(len(profile.layers), stages)
        if offer is None or all(map(offer.holds, memories(profile, plan, staleness)))
    ]
    if not fitting:
        with pytest.raises(CapacityError, match=f"no cut into {stages} stages"):
            plan_stages(profile, stages, staleness, cost=cost, offer=offer)
        return
    plan = plan_stages(profile, stages, staleness, cost=cost, offer=offer)
    assert plan in fitting

    def figures(one) -> tuple[float, int]:
        return worst_cost(profile, one, cost), worst_memory(profile, one, staleness)

    assert figures(plan) == min(map(figures, fitting))


def test_equal_layers_are_shared_equally():
    plan = plan_stages(uniform(12), 4)
    assert [cut.end_layer for cut in plan] == [3, 6, 9, 12]


def test_a_heavy_head_gets_fewer_layers_beside_it():
    plan = plan_stages(uniform(8, head_flops=30), 2)
    assert [(cut.first_layer, cut.end_layer) for cut in plan] == [(0, 5), (5, 8)]


def test_among_equally_fast_cuts_memory_is_balanced():
    heavy_embedding = ModelProfile(
        PartProfile(0, 1000, 0),
        (PartProfile(10, 100, 0),) * 5,
        PartProfile(0, 10, 0),
        0,
        0,
    )
    plan = plan_stages(heavy_embedding, 2)
    assert [cut.end_layer for cut in plan] == [2, 5]


def test_a_large_model_is_planned_in_little_time():
    plan = plan_stages(uniform(200, head_flops=25), 64)
    assert len(plan) == 64
    assert plan[-1].end_layer == 200


def test_counted_gradients_are_twice_as_wide_where_they_are_averaged_in_host_memory():
    profile, cut = uniform(4), StageRange(first_layer=1, end_layer=3)
    for staleness in (0, 1):
        plain, exact = (
            stage_memory(profile, cut, False, False, staleness, exact=exact)
            for exact in (False, True)
        )
        parameters = stage_profile(profile, cut, False, False).parameters
        assert exact.host_bytes - plain.host_bytes == 2 * 4 * parameters
        assert exact.device_bytes == plain.device_bytes


@given(
    st.tuples(parts, parts, parts), st.integers(0, 8), st.integers(0, 100), st.booleans(),
    st.booleans(), st.integers(0, 1), st.integers(0, 3000),
)  # fmt: skip
def test_the_memory_of_a_stage_tells_the_sizes_of_its_graphs(
    three, layers, input_bytes, is_first, is_last, staleness, more
):
    embedding, layer, head = three
    profile = ModelProfile(embedding, (layer,) * 8, head, 0, input_bytes)
    cut = StageRange(first_layer=0, end_layer=layers)
    memory = stage_memory(profile, cut, is_first, is_last, staleness)
    held = parameter_memory(
        stage_profile(profile, cut, is_first, is_last).parameters, staleness, False
    )
    ends = is_first * embedding.saved_activation_bytes + is_last * head.saved_activation_bytes
    ends += 0 if is_last else input_bytes
    sizes = GraphSizes(layers, layer.saved_activation_bytes, input_bytes, ends)
    found = graph_sizes(memory, held, layers, input_bytes, is_last)
    assert found.graph_bytes() == sizes.graph_bytes()
    room = memory.device_bytes - held.device_bytes + more
    assert found.recomputed_layers(room, is_last) == sizes.recomputed_layers(room, is_last)


@given(
    st.builds(StageMemory, device_bytes=counts, comfortable_bytes=counts),
    st.builds(StageMemory, device_bytes=counts), st.integers(0, 512), counts, st.booleans(),
)  # fmt: skip
def test_figures_that_no_profile_has_made_give_sizes_as_well(
    memory, held, layers, input_bytes, is_last
):
    found = graph_sizes(memory, held, layers, input_bytes, is_last)
    assert min(found.layer_bytes, found.ends_bytes) >= 0
    assert 0 <= found.recomputed_layers(memory.device_bytes, is_last) <= layers


def test_gradients_that_lag_a_step_behind_take_another_weight_and_gradient():
    profile, cut = uniform(4), StageRange(first_layer=1, end_layer=3)
    at_once, lagging = (stage_memory(profile, cut, False, False, staleness) for staleness in (0, 1))
    more = 8 * stage_profile(profile, cut, False, False).parameters
    assert lagging.device_bytes - at_once.device_bytes == more
    assert lagging.host_bytes == at_once.host_bytes


@pytest.mark.parametrize(
    ("name", "device_bytes", "host_bytes"), [("7b", 0.8 * 8e9, 0.8 * 16e9), ("1b", 2e9, 4e9)]
)
def test_the_inner_stages_of_large_models_fit_cards_that_people_have(
    name: str, device_bytes: float, host_bytes: float
) -> None:
    """What a client offers of a card of 8 GB in a machine with 16 GB, and 2 GB."""
    chosen = PRESETS[name]
    profile = profile_layers(chosen.model, chosen.sequences_per_microbatch, "bfloat16")
    offer = MemoryOffer(device_bytes=int(device_bytes), host_bytes=int(host_bytes))
    for cut in plan_stages(profile, chosen.stages, exact=True)[1:-1]:
        memory = stage_memory(profile, cut, False, False, exact=True)
        assert offer.holds(memory)
        assert 0.75 <= offer.speed(memory, WORK) < 1


def test_weights_in_host_memory_make_room_for_an_inner_stage_of_7b_on_a_card_of_6_gb() -> None:
    chosen = PRESETS["7b"]
    profile = profile_layers(chosen.model, chosen.sequences_per_microbatch, "bfloat16")
    cut = plan_stages(profile, chosen.stages, exact=True)[1]
    memory = stage_memory(profile, cut, False, False, exact=True)
    offer = MemoryOffer(device_bytes=int(0.8 * 6e9), host_bytes=int(0.8 * 32e9))
    assert offer.holds(memory)
    assert not offer.holds(memory.model_copy(update={"streamable_bytes": 0}))
    matrices = LayerMatrices.of(chosen.model)
    assert memory.stream_buffer_bytes == 6 * 4 * matrices.largest
    # Weights and gradients of two layers.
    assert memory.streamable_bytes == 4 * 4 * matrices.total - memory.stream_buffer_bytes


def test_frozen_matrices_are_streamed_once_for_all_versions() -> None:
    trained = LayerMatrices(total=100, largest=10)
    frozen = LayerMatrices(total=100, largest=10, are_frozen=True)
    assert frozen.streamable_bytes(2, 0) == frozen.streamable_bytes(2, 1) == 4 * (200 - 40)
    assert trained.streamable_bytes(2, 0) == 4 * (400 - 60)
    assert trained.streamable_bytes(2, 1) == 4 * (600 - 60)
    assert trained.streamable_bytes(0, 0) == 0
