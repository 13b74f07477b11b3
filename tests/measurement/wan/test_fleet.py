"""Who holds which stage, and the bound that nobody can beat."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.wan.fleet import (
    Member,
    Sizes,
    assign,
    compute_bound,
    minimum_bytes,
    pipeline_bound,
)
from benchmarks.wan.mixes import Link, Mix, Peer, Training
from benchmarks.wan.proportions import proportions_of
from swarm_shared.base.errors import ConfigurationError

FAST = Link(up_mbit=1000, down_mbit=1000)
SIZES = Sizes(
    work_flops=(100.0, 100.0, 100.0), border_bytes=250_000, gradient_bytes=(10**6,) * 3,
    microbatches=10, tokens_per_microbatch=7,
)  # fmt: skip


def member(stage: int, flops: float, link: Link = FAST) -> Member:
    return Member(f"{stage}-{flops}", Peer(link_name="l", link=link, speed=1.0), stage, flops)


def test_without_narrow_lines_the_slowest_stage_is_the_bound() -> None:
    bound = pipeline_bound(SIZES, [member(0, 100.0), member(1, 50.0), member(2, 100.0)])
    assert bound.stage == 1
    assert bound.step_seconds == pytest.approx(20.0)
    assert bound.tokens_per_second == pytest.approx(70 / 20)


def test_a_stage_in_the_middle_sends_an_activation_and_a_gradient_per_microbatch() -> None:
    narrow = Link(up_mbit=2, down_mbit=1000)
    fleet = [member(stage, 1e6, narrow) for stage in range(3)]
    bound = pipeline_bound(SIZES, fleet)
    assert (bound.stage, bound.step_seconds) == (1, pytest.approx(20.0))


def test_two_peers_share_a_stage_as_well_as_they_can_and_average() -> None:
    narrow = Link(up_mbit=8, down_mbit=1000)
    # One is limited by its computing, one by its line: 1 s for the average, 0.5 s a microbatch.
    fleet = [member(0, 1e6), member(1, 50.0), member(1, 1e6, narrow), member(2, 1e6)]
    seconds = pipeline_bound(SIZES, fleet).step_seconds
    assert seconds / 2 + (seconds - 1) / 0.5 == pytest.approx(10)


def test_all_machines_computing_is_the_bound_without_any_network() -> None:
    fleet = [member(0, 100.0), member(1, 50.0), member(2, 150.0)]
    assert compute_bound(SIZES, fleet) == pytest.approx(7)


def test_nobody_gets_along_with_fewer_bytes_than_borders_and_averages_take() -> None:
    fleet = [member(0, 1.0), member(1, 1.0), member(1, 1.0), member(2, 1.0)]
    assert minimum_bytes(SIZES, fleet) == 2 * 2 * 10 * 250_000 + 2 * 10**6


def test_proportions_are_of_the_largest_stage_and_of_the_stage_that_sends_most() -> None:
    three = replace(SIZES, gradient_bytes=(10**6, 2 * 10**6, 10**6))
    own = proportions_of(three, 0.25, 10**6)
    assert own.gradients_over_tensors == pytest.approx(2e6 / (2 * 10 * 250_000))
    assert own.computing_over_sending == pytest.approx(0.25 / 0.5)
    two = replace(three, work_flops=(100.0, 100.0))
    assert proportions_of(two, 0.25, 10**6).gradients_over_tensors == pytest.approx(0.8)


def test_stages_are_filled_so_that_the_thinnest_gets_the_next_fastest_machine() -> None:
    speeds = [1.0, 2.0, 0.5, 1.0, 2.0, 1.0, 1.0, 1.0]
    peers = tuple(Peer(link_name="l", link=FAST, speed=s) for s in speeds)
    mix = Mix(name="m", peers=peers, training=Training(microbatch_seconds=0.5))
    members = assign(mix, [10.0, 10.0, 10.0, 10.0])
    assert sorted(one.stage for one in members) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert sorted(one.name for one in members) == [f"peer-{index}" for index in range(1, 9)]
    by_name = {one.name: one for one in members}
    assert by_name["peer-2"].flops_per_second == pytest.approx(2 * 10.0 / 0.5)
    assert {by_name["peer-2"].stage, by_name["peer-5"].stage} == {0, 1}


def test_stages_of_unlike_work_get_as_many_machines_all_the_same() -> None:
    def mix(count: int) -> Mix:
        peer = Peer(link_name="l", link=FAST, speed=1.0)
        return Mix(name="m", peers=(peer,) * count, training=Training(stages=2))

    members = assign(mix(6), [10.0, 30.0])
    assert sorted(one.stage for one in members) == [0, 0, 0, 1, 1, 1]
    with pytest.raises(
        ConfigurationError, match="has 5 machines; stages of equal size need a multiple of 2"
    ):
        assign(mix(5), [10.0, 10.0])
