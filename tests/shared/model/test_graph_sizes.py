"""What of a graph fits, against all choices."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.model.graph_sizes import GraphSizes, LayerSeconds

NEARLY = 1.15
"""Layers in turn computed again and copied would be better by so much, where both take equally
long."""

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


# ---------------------------------------------------------------- computed again, or copied


MICROBATCHES = 6


class Device:
    """A device that computes microbatch after microbatch, with an engine for each direction of
    copies. Each microbatch's backward pass follows the forward pass of the next one. At most two
    layers are on their way to the host, and one is fetched ahead."""

    def __init__(self, choices: tuple[str, ...], seconds: LayerSeconds) -> None:
        self._choices, self._seconds = choices, seconds
        self._copied = [at for at, one in enumerate(choices) if one == "copied"]
        self.now = self._out_free = self._in_free = 0.0
        self._gone: dict[tuple[int, int], float] = {}
        self._there: dict[tuple[int, int], float] = {}

    def forward(self, microbatch: int) -> None:
        for at in range(len(self._choices)):
            if at in self._copied[2:]:
                before = self._copied[self._copied.index(at) - 2]
                self.now = max(self.now, self._gone[microbatch, before])
            self.now += self._seconds.forward
            if at in self._copied:
                self._out_free = max(self._out_free, self.now) + self._seconds.copy
                self._gone[microbatch, at] = self._out_free

    def _fetch(self, key: tuple[int, int]) -> None:
        if key not in self._there:
            began = max(self.now, self._in_free, self._gone[key])
            self._there[key] = self._in_free = began + self._seconds.copy

    def backward(self, microbatch: int) -> None:
        for at in reversed(range(len(self._choices))):
            if at in self._copied:
                self._fetch((microbatch, at))
                self.now = max(self.now, self._there[microbatch, at])
            below = [layer for layer in self._copied if layer < at]
            if below:
                self._fetch((microbatch, below[-1]))
            self.now += (2 + (self._choices[at] == "again")) * self._seconds.forward


def microbatch_seconds(choices: tuple[str, ...], seconds: LayerSeconds) -> float:
    device = Device(choices, seconds)
    device.forward(0)
    for number in range(MICROBATCHES):
        device.forward(number + 1)
        device.backward(number)
    return device.now / MICROBATCHES


copied_layers = st.builds(LayerSeconds, forward=st.just(1.0), copy=st.floats(0.01, 6))


def chosen(seconds: LayerSeconds, layers: int, kept: int) -> tuple[str, ...]:
    first = "copied" if seconds.is_worth_copies else "again"
    return (first,) * (layers - kept) + ("kept",) * kept


@given(copied_layers, st.integers(2, 5), st.data())
def test_what_is_chosen_for_layers_is_nearly_the_best_of_all_choices(
    seconds: LayerSeconds, layers: int, data: st.DataObject
) -> None:
    kept = data.draw(st.integers(1, layers), "kept layers")
    every = itertools.product(("kept", "again", "copied"), repeat=layers)
    best = min(microbatch_seconds(one, seconds) for one in every if one.count("kept") <= kept)
    assert microbatch_seconds(chosen(seconds, layers, kept), seconds) <= NEARLY * best


@pytest.mark.parametrize("copy", [0.5, 1.5, 2.0, 4.0])
def test_of_eight_layers_as_well(copy: float) -> None:
    seconds = LayerSeconds(1.0, copy)
    every = itertools.product(("again", "copied"), repeat=7)
    best = min(microbatch_seconds((*one, "kept"), seconds) for one in every)
    assert microbatch_seconds(chosen(seconds, 8, 1), seconds) <= NEARLY * best


@given(copied_layers, st.integers(3, 12))
def test_the_time_that_copies_add_is_at_most_what_is_predicted(
    seconds: LayerSeconds, layers: int
) -> None:
    choices = ("copied",) * (layers - 1) + ("kept",)
    predicted = layers * 3 * seconds.forward + (layers - 1) * seconds.added_by_copies
    found = microbatch_seconds(choices, seconds)
    assert found <= predicted * 1.001 + layers * seconds.forward / MICROBATCHES
