"""What of a graph fits, against all choices."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.run.graph_sizes import GRAPHS, GraphSizes

sizes_strategy = st.builds(
    GraphSizes,
    layers=st.integers(0, 6),
    layer_bytes=st.integers(20, 100),
    input_bytes=st.integers(1, 10),
    ends_bytes=st.integers(0, 100),
)


def peak_bytes(sizes: GraphSizes, again: tuple[bool, ...]) -> int:
    """The most memory of one microbatch, layer by layer, with these layers computed again."""
    held = [sizes.input_bytes if one else sizes.layer_bytes for one in again]
    peak = live = sizes.ends_bytes + sum(held)
    for at in reversed(range(sizes.layers)):
        if again[at]:
            peak = max(peak, live + sizes.layer_bytes)
        live -= held[at]
    return peak


@given(sizes_strategy, st.integers(0, 900))
def test_no_choice_of_layers_that_fits_computes_fewer_again(sizes: GraphSizes, room: int) -> None:
    choices = itertools.product((False, True), repeat=sizes.layers)
    fitting = [sum(again) for again in choices if peak_bytes(sizes, again) <= room]
    assert sizes.fewest_recomputed(room) == min(fitting, default=None)


@given(sizes_strategy)
def test_the_first_layers_again_take_no_more_than_is_counted(sizes: GraphSizes) -> None:
    for recomputed in range(sizes.layers + 1):
        again = tuple(at < recomputed for at in range(sizes.layers))
        assert peak_bytes(sizes, again) == sizes.working_bytes(recomputed)


def test_a_stage_without_layers_keeps_its_ends_or_nothing() -> None:
    ends = GraphSizes(layers=0, layer_bytes=0, input_bytes=0, ends_bytes=7)
    assert ends.fewest_recomputed(7) == 0
    assert ends.fewest_recomputed(6) is None


def least_room(sizes: GraphSizes) -> int:
    """What a peer with the least memory has: the inputs of two microbatches, and one layer."""
    return sizes.graph_bytes(sizes.layers) + sizes.working_bytes(sizes.layers)


@given(sizes_strategy, st.integers(0, 900), st.integers(0, 100), st.booleans())
def test_more_memory_than_the_least_never_means_more_layers_again(
    sizes: GraphSizes, spare: int, more: int, is_last: bool
) -> None:
    room = least_room(sizes) + spare
    found = sizes.recomputed_layers(room, is_last)
    assert 0 <= sizes.recomputed_layers(room + more, is_last) <= found <= sizes.layers


@given(sizes_strategy)
def test_two_whole_graphs_have_no_layer_again_and_the_least_memory_has_all(
    sizes: GraphSizes,
) -> None:
    assert sizes.recomputed_layers(GRAPHS * sizes.graph_bytes(), False) == 0
    assert sizes.recomputed_layers(sizes.graph_bytes(), True) == 0
    if least_room(sizes) < GRAPHS * sizes.graph_bytes():
        assert sizes.recomputed_layers(least_room(sizes), False) == sizes.layers
