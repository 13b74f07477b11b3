"""Which stage a newcomer takes: the same answer on both sides, whatever the rows say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.base.errors import CapacityError
from swarm_shared.base.types import StageIndex
from swarm_shared.protocol import StageRow
from swarm_shared.scheduling.placement import most_underserved_stage

LARGEST = 1e30


def row(stage: int, peers: int = 0, work: float = 1.0, memory: int = 100) -> StageRow:
    return StageRow(
        stage=StageIndex(stage), peers=peers, microbatches_per_second=0.0, work_flops=work,
        memory_bytes=memory,
    )  # fmt: skip


rows_strategy = st.lists(
    st.tuples(
        st.integers(0, 2**53 - 1),
        st.one_of(st.just(0.0), st.floats(0, LARGEST, allow_nan=False)),
        st.integers(0, 200),
    ),
    min_size=1,
    max_size=8,
).map(lambda entries: [row(i, *entry) for i, entry in enumerate(entries)])


def test_a_stage_without_a_peer_comes_first() -> None:
    assert most_underserved_stage([row(0, 1), row(1, 0, work=1e-3), row(2, 1)], 100) == 1


def test_the_stage_with_the_fewest_peers_for_its_work_comes_next() -> None:
    assert most_underserved_stage([row(0, 2, work=1.0), row(1, 3, work=2.0)], 100) == 1
    assert most_underserved_stage([row(0, 2, work=1.0), row(1, 5, work=2.0)], 100) == 0


def test_ties_go_to_the_earlier_stage() -> None:
    assert most_underserved_stage([row(0, 1), row(1, 1), row(2, 1)], 100) == 0


def test_a_stage_whose_work_is_unknown_counts_like_the_mean() -> None:
    assert most_underserved_stage([row(0, 2, work=0.0), row(1, 3, work=4.0)], 100) == 1
    assert most_underserved_stage([row(0, 2, work=0.0), row(1, 1, work=0.0)], 100) == 1


def test_a_stage_that_does_not_fit_is_left_to_others() -> None:
    assert most_underserved_stage([row(0, 0, memory=101), row(1, 9, memory=100)], 100) == 1


def test_a_machine_that_fits_no_stage_is_told_what_would() -> None:
    with pytest.raises(CapacityError, match=r"offers 1 GiB.*needs 2 GiB"):
        most_underserved_stage([row(0, memory=3 * 2**30), row(1, memory=2 * 2**30)], 2**30)


def test_a_run_without_stages_is_an_error_that_is_explained() -> None:
    with pytest.raises(CapacityError, match="no stage"):
        most_underserved_stage([], 100)


@pytest.mark.parametrize("works", [(LARGEST, LARGEST), (5e-324, LARGEST), (5e-324, 0.0)])
def test_absurd_numbers_from_the_network_do_not_overflow(works: tuple[float, float]) -> None:
    assert most_underserved_stage([row(0, 2, works[0]), row(1, 0, works[1])], 100) == 1


def test_newcomers_one_after_the_other_spread_in_proportion_to_the_work() -> None:
    works = [3.0, 1.0, 2.0]
    peers = [0, 0, 0]
    for _ in range(60):
        rows = [row(i, peers[i], works[i]) for i in range(3)]
        peers[most_underserved_stage(rows, 100)] += 1
    assert peers == [30, 10, 20]


@given(rows_strategy, st.integers(0, 200))
def test_the_choice_fits_and_no_fitting_stage_is_emptier(rows: list[StageRow], memory: int) -> None:
    fitting = [r for r in rows if r.memory_bytes <= memory]
    if not fitting:
        with pytest.raises(CapacityError):
            most_underserved_stage(rows, memory)
        return
    chosen = rows[most_underserved_stage(rows, memory)]
    assert chosen in fitting
    assert chosen.peers == 0 or all(r.peers > 0 for r in fitting)


@given(rows_strategy, st.permutations(range(8)))
def test_the_order_of_the_rows_does_not_matter(rows: list[StageRow], order: list[int]) -> None:
    shuffled = [rows[i] for i in order if i < len(rows)]
    assert most_underserved_stage(rows, 200) == most_underserved_stage(shuffled, 200)
