"""Which stage a newcomer takes: the same answer on both sides, whatever the rows say."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kits.memory import WORK, offers, takes
from swarm_shared.base.errors import CapacityError
from swarm_shared.base.memory import MachineBalance, MemoryOffer, StageMemory, StreamedWork
from swarm_shared.base.types import StageIndex
from swarm_shared.protocol import StageRow
from swarm_shared.scheduling.placement import most_underserved_stage
from swarm_shared.scheduling.placement.joining import NEARLY_EQUAL

LARGEST = 1e30


def row(
    stage: int, peers: int = 0, work: float = 1.0, memory: int = 100, rate: float = 0.0,
    sent: int = 0,
) -> StageRow:  # fmt: skip
    return StageRow(
        stage=StageIndex(stage), peers=peers, microbatches_per_second=rate, work_flops=work,
        memory=takes(memory), sent_bytes=sent,
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


@given(
    st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=6), st.from_type(MachineBalance),
    st.from_type(StreamedWork),
)  # fmt: skip
def test_a_claimed_balance_buys_only_a_choice_among_stages_about_as_slow_as_the_slowest(
    rates: list[float], balance: MachineBalance, work: StreamedWork
) -> None:
    rows = [row(index, 1, rate=rate) for index, rate in enumerate(rates)]
    streamed = StageMemory(device_bytes=100, comfortable_bytes=150, streamable_bytes=50)
    rows = [
        one.model_copy(update={"memory": streamed} if at % 2 else {}) for at, one in enumerate(rows)
    ]
    offer = MemoryOffer(device_bytes=100, host_bytes=100, balance=balance)
    chosen = rows[most_underserved_stage(rows, offer.replaced(60), work)]
    fitting = [one for one in rows if offer.replaced(60).holds(one.memory)]
    slowest = min(one.microbatches_per_second for one in fitting)
    assert chosen.microbatches_per_second <= NEARLY_EQUAL * slowest


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        ([row(0, 1), row(1, 1), row(2, 1)], 0),  # ties go to the earlier stage
        ([row(0, 1), row(1, 0, work=1e-3), row(2, 1)], 1),
        ([row(0, 2, work=1.0), row(1, 3, work=2.0)], 1),
        ([row(0, 2, work=1.0), row(1, 5, work=2.0)], 0),
        # A stage whose work is unknown counts like the mean.
        ([row(0, 2, work=0.0), row(1, 3, work=4.0)], 1),
        ([row(0, 2, work=0.0), row(1, 1, work=0.0)], 1),
        ([row(0, 0, memory=101), row(1, 9, memory=100)], 1),  # stage 0 does not fit
        # Absurd numbers from the network do not overflow.
        ([row(0, 2, LARGEST), row(1, 0, LARGEST)], 1),
        ([row(0, 2, 5e-324), row(1, 0, LARGEST)], 1),
        ([row(0, 2, 5e-324), row(1, 0, 0.0)], 1),
    ],
)
def test_the_stage_with_the_fewest_peers_for_its_work_is_chosen(
    rows: list[StageRow], chosen: int
) -> None:
    assert most_underserved_stage(rows, offers(100), WORK) == chosen


def test_a_machine_that_fits_no_stage_is_told_what_would() -> None:
    with pytest.raises(CapacityError, match=r"offers 1 GiB.*needs 2 GiB"):
        most_underserved_stage(
            [row(0, memory=3 * 2**30), row(1, memory=2 * 2**30)], offers(2**30), WORK
        )


def test_a_run_without_stages_is_an_error_that_is_explained() -> None:
    with pytest.raises(CapacityError, match="no stage"):
        most_underserved_stage([], offers(100), WORK)


def test_newcomers_one_after_the_other_spread_in_proportion_to_the_work() -> None:
    works = [3.0, 1.0, 2.0]
    peers = [0, 0, 0]
    for _ in range(60):
        rows = [row(i, peers[i], works[i]) for i in range(3)]
        peers[most_underserved_stage(rows, offers(100), WORK)] += 1
    assert peers == [30, 10, 20]


@given(rows_strategy, st.integers(0, 200))
def test_the_choice_fits_and_no_fitting_stage_is_emptier(rows: list[StageRow], memory: int) -> None:
    fitting = [r for r in rows if r.memory.device_bytes <= memory]
    if not fitting:
        with pytest.raises(CapacityError):
            most_underserved_stage(rows, offers(memory), WORK)
        return
    chosen = rows[most_underserved_stage(rows, offers(memory), WORK)]
    assert chosen in fitting
    assert chosen.peers == 0 or all(r.peers > 0 for r in fitting)


@given(rows_strategy, st.permutations(range(8)))
def test_the_order_of_the_rows_does_not_matter(rows: list[StageRow], order: list[int]) -> None:
    shuffled = [rows[i] for i in order if i < len(rows)]
    assert most_underserved_stage(rows, offers(200), WORK) == most_underserved_stage(
        shuffled, offers(200), WORK
    )


# ---------------------------------------------------------------- uplinks

measured_rows = st.lists(
    st.tuples(
        st.integers(1, 1000), st.floats(1e6, 1e15), st.integers(0, 200), st.floats(1e-6, 1e6),
        st.integers(0, 10**9),
    ),
    min_size=1,
    max_size=8,
).map(lambda entries: [row(i, *entry) for i, entry in enumerate(entries)])  # fmt: skip

PEER_FLOPS = 1e12


def pipeline(counts: list[int], boundary_bytes: int = 1_000_000) -> list[StageRow]:
    """Equal stages with so many equal peers each; those in the middle send twice as much."""
    last = len(counts) - 1
    return [
        row(i, n, PEER_FLOPS, rate=float(n), sent=boundary_bytes * (1 if i in (0, last) else 2))
        for i, n in enumerate(counts)
    ]


@given(st.one_of(measured_rows, rows_strategy))
def test_with_an_unlimited_uplink_the_choice_is_that_without_one(rows: list[StageRow]) -> None:
    # Faster than any of these stages can compute.
    assert most_underserved_stage(rows, offers(200), WORK, 1e30) == most_underserved_stage(
        rows, offers(200), WORK
    )


@given(
    st.lists(
        st.tuples(
            st.integers(1, 9), st.sampled_from((1.0, 3.0, 10.0)),
            st.sampled_from((1.0, 1.01, NEARLY_EQUAL + 0.01)), st.sampled_from((0, 1, 2, 5)),
        ),
        min_size=1, max_size=6,
    ),
    st.sampled_from((0.1, 1.0, 10.0, 100.0)),
)  # fmt: skip
def test_with_a_known_uplink_it_takes_of_the_slowest_stages_the_one_that_it_adds_most_work_to(
    entries: list[tuple[int, float, float, int]], up: float
) -> None:
    rows = [row(i, n, work, 100, rate, sent) for i, (n, work, rate, sent) in enumerate(entries)]
    peers = sum(one.peers for one in rows)
    computed = sum(one.microbatches_per_second * one.work_flops for one in rows) / peers

    def added(one: StageRow) -> float:
        """Operations per second; each machine is taken to compute as fast as the mean."""
        return min(computed, up / one.sent_bytes * one.work_flops if one.sent_bytes else computed)

    slowest = min(one.microbatches_per_second for one in rows)
    near = [one for one in rows if one.microbatches_per_second <= NEARLY_EQUAL * slowest]
    chosen = rows[most_underserved_stage(rows, offers(100), WORK, up)]
    assert chosen in near
    assert added(chosen) == pytest.approx(max(map(added, near)))


def test_a_slower_stage_comes_before_what_the_uplink_prefers() -> None:
    assert most_underserved_stage(pipeline([10, 9, 10]), offers(100), WORK, 1.0) == 1
    assert most_underserved_stage(pipeline([10, 0, 10]), offers(100), WORK, 1.0) == 1
    assert most_underserved_stage(pipeline([31, 30, 31]), offers(100), WORK, 1.0) == 0, (
        "by one peer of thirty"
    )


def test_of_stages_without_a_peer_it_takes_an_end() -> None:
    assert most_underserved_stage(pipeline([2, 0, 0]), offers(100), WORK, 1.0) == 2


@given(
    st.one_of(measured_rows, rows_strategy), st.sets(st.integers(0, 7), min_size=1),
    st.sampled_from([0.0, 1.0, 1e9]),
)  # fmt: skip
def test_only_a_stage_that_is_allowed_is_chosen(
    rows: list[StageRow], stages: set[int], up: float
) -> None:
    allowed = {StageIndex(stage) for stage in stages}
    if any(one.stage in allowed and one.memory.device_bytes <= 200 for one in rows):
        assert most_underserved_stage(rows, offers(200), WORK, up, allowed) in allowed
    else:
        with pytest.raises(CapacityError):
            most_underserved_stage(rows, offers(200), WORK, up, allowed)
    with suppress(CapacityError):
        free = most_underserved_stage(rows, offers(200), WORK)
        assert most_underserved_stage(rows, offers(200), WORK, allowed=allowed | {free}) == free


def test_before_rates_are_known_peers_are_counted() -> None:
    rows = [row(0, 1, sent=2), row(1, 1, sent=1)]
    assert most_underserved_stage(rows, offers(100), WORK, 1e-6) == 0


def test_thin_newcomers_one_after_the_other_serve_all_stages_alike() -> None:
    uplink, counts = 1e6, [1, 1, 1, 1]
    rates = [1.0, 0.5, 0.5, 1.0]
    for _ in range(56):
        rows = [
            one.model_copy(update={"microbatches_per_second": rate})
            for one, rate in zip(pipeline(counts), rates, strict=True)
        ]
        stage = most_underserved_stage(rows, offers(100), WORK, uplink)
        counts[stage] += 1
        rates[stage] += 1.0 if stage in (0, 3) else 0.5
    assert counts == [10, 20, 20, 10]
