"""Graphs that are computed again or copied, against all choices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarm_shared.model.layer_seconds import GraphPlace, LayerSeconds, places

NEARLY = 1.1
"""Copied layers between others, rather than before them, are better by at most 7 %."""

layer_seconds = st.builds(LayerSeconds, forward=st.just(1.0), copy=st.floats(0.01, 10))


def chosen(seconds: LayerSeconds, layers: int, kept: int) -> Sequence[GraphPlace]:
    not_kept = layers - kept
    return places(layers, not_kept, seconds.copied_layers(layers, not_kept))


def best(seconds: LayerSeconds, layers: int, kept: int) -> float:
    """The least time of any choice for each layer, with at most so many kept."""
    every = itertools.product(GraphPlace, repeat=layers)
    return min(seconds.microbatch(one) for one in every if one.count(GraphPlace.KEPT) <= kept)


@given(layer_seconds, st.integers(1, 5), st.data())
def test_what_is_chosen_is_nearly_the_best_of_all_choices(
    seconds: LayerSeconds, layers: int, data: st.DataObject
) -> None:
    kept = data.draw(st.integers(0, layers), "kept layers")
    found = seconds.microbatch(chosen(seconds, layers, kept))
    assert found <= NEARLY * best(seconds, layers, kept)


@pytest.mark.parametrize("kept", [1, 4])
@pytest.mark.parametrize("copy", [0.5, 2.0, 4.0])
def test_of_eight_layers_as_well(copy: float, kept: int) -> None:
    seconds = LayerSeconds(1.0, copy)
    found = seconds.microbatch(chosen(seconds, 8, kept))
    assert found <= NEARLY * best(seconds, 8, kept)


@given(layer_seconds, st.integers(1, 8), st.data())
@example(LayerSeconds(1.0, 1e-9), 8, None)
def test_it_is_never_slower_than_to_compute_all_layers_again(
    seconds: LayerSeconds, layers: int, data: st.DataObject | None
) -> None:
    kept = 0 if data is None else data.draw(st.integers(0, layers), "kept layers")
    again = seconds.microbatch(places(layers, layers - kept, 0))
    assert seconds.microbatch(chosen(seconds, layers, kept)) <= again


def test_copies_that_take_no_time_are_made_and_endless_ones_are_not() -> None:
    assert LayerSeconds(1.0, 1e-9).copied_layers(8, 5) == 5
    assert LayerSeconds(1.0, 1e9).copied_layers(8, 5) == 0
    assert LayerSeconds(1.0, 1.0).copied_layers(8, 0) == 0
