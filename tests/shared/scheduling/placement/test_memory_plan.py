"""How a machine's memory would be used for a stage."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.scheduling.placement.test_memory_need import honest_manifest
from swarm_shared.base.memory import MemoryOffer
from swarm_shared.base.types import StageIndex
from swarm_shared.model.profile import profile_layers
from swarm_shared.protocol import StageNeeds
from swarm_shared.run.graph_sizes import GraphSizes
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.model_config import PRESETS, ComputeDtype
from swarm_shared.run.stage_cut import graph_sizes
from swarm_shared.scheduling.placement.memory_plan import MemoryPlan, memory_plan, stage_needs


@cache
def manifest_of_preset(name: str, dtype: ComputeDtype) -> Manifest:
    chosen = PRESETS[name]
    return honest_manifest(chosen.model, chosen.sequences_per_microbatch, chosen.stages, dtype)


def offer_of(needs: StageNeeds, device_bytes: int, has_own_memory: bool) -> MemoryOffer:
    """So much for the device, and what the stage takes of the host's besides."""
    host_bytes = needs.memory.host_bytes
    if has_own_memory:
        return MemoryOffer(device_bytes=device_bytes, host_bytes=host_bytes)
    return MemoryOffer(device_bytes=device_bytes + host_bytes)


def sizes_of(needs: StageNeeds) -> GraphSizes:
    return graph_sizes(
        needs.memory, needs.parameter_memory, needs.layers, needs.layer_input_bytes, needs.is_last
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PRESETS)
def test_needs_tell_the_profiles_sizes(name: str, dtype: ComputeDtype) -> None:
    manifest = manifest_of_preset(name, dtype)
    profile = profile_layers(manifest.model, manifest.training.sequences_per_microbatch, dtype)
    boundary, layer = profile.boundary_activation_bytes, profile.layers[0].saved_activation_bytes
    for index, cut in enumerate(manifest.stages):
        needs = stage_needs(manifest, StageIndex(index))
        ends = profile.embedding.saved_activation_bytes if index == 0 else 0
        ends += profile.head.saved_activation_bytes if needs.is_last else boundary
        layers = cut.end_layer - cut.first_layer
        if layers > 1 or not needs.is_last:
            assert sizes_of(needs) == GraphSizes(layers, layer, boundary, ends)


@given(
    st.sampled_from(["first", "inner", "last"]), st.integers(0, 2**32), st.integers(0, 2**32),
    st.booleans(),
)  # fmt: skip
def test_more_memory_is_never_a_worse_plan(place: str, spare: int, more: int, own: bool) -> None:
    manifest = manifest_of_preset("1b", "bfloat16")
    stage = {"first": 0, "inner": 1, "last": manifest.stage_count - 1}[place]
    needs = stage_needs(manifest, StageIndex(stage))
    offer = offer_of(needs, needs.memory.device_bytes + spare, own)
    plan = memory_plan(offer, needs)
    larger = memory_plan(offer.replaced(offer.device_bytes + more), needs)
    assert 0 <= larger.recomputed_layers <= plan.recomputed_layers <= needs.layers
    assert larger.speed >= plan.speed
    assert (plan.speed == 1.0) == (plan.recomputed_layers == 0)
    assert plan.streamed_bytes == 0


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", ["1b", "7b"])
def test_the_least_memory_has_all_layers_again_and_the_comfortable_none(
    name: str, own: bool
) -> None:
    needs = stage_needs(manifest_of_preset(name, "bfloat16"), StageIndex(1))
    least = memory_plan(offer_of(needs, needs.memory.device_bytes, own), needs)
    comfortable = memory_plan(offer_of(needs, needs.memory.comfortable_bytes, own), needs)
    assert least == MemoryPlan(needs.layers, 0, pytest.approx(0.75))
    assert comfortable == MemoryPlan(0, 0, 1.0)


def test_weights_in_host_memory_leave_the_graphs_their_least_room() -> None:
    needs = stage_needs(manifest_of_preset("7b", "bfloat16"), StageIndex(1))
    device_bytes = needs.memory.device_bytes - 10**9
    plan = memory_plan(MemoryOffer(device_bytes=device_bytes, host_bytes=2 * 10**10), needs)
    assert (plan.streamed_bytes, plan.recomputed_layers) == (10**9, needs.layers)
