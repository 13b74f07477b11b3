"""Routing shares work in proportion to rates, without herds, and never starves a stage."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.base.types import MicrobatchIndex, PeerId
from swarm_shared.scheduling.routing import (
    ESTIMATE_HALF_LIFE_SECONDS,
    FIRST_BAN_SECONDS,
    MAX_BAN_SECONDS,
    PROBE_SHARE,
    Observation,
    StageRouting,
)
from swarm_shared.scheduling.step_plan import HANDICAP, plan_step

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


FIRST = MicrobatchIndex(0)


def unplanned(*peers: PeerId, seed: int = 1) -> StageRouting:
    """A table without rates, which so has no plan."""
    routing = StageRouting(random.Random(seed), 8)
    routing.update(dict.fromkeys(peers, 0.0))
    return routing


def table(**seconds: float) -> StageRouting:
    """The same with one observation of each peer."""
    routing = unplanned(*map(PeerId, seconds))
    for name, value in seconds.items():
        routing.observe(PeerId(name), Observation(value), 0.0)
    return routing


def nothing(*peers: PeerId) -> dict[PeerId, int]:
    return dict.fromkeys(peers, 0)


def share_out(
    routing: StageRouting, seconds: dict[PeerId, float], under_way: int, total: int,
    behind_seconds: float = 0.0,
) -> Counter[PeerId]:  # fmt: skip
    """Keeps so many under way; each peer does one after the other, and what is behind all of them
    takes `behind_seconds` more. How many each has done of the second half."""
    now, free_at = 0.0, dict.fromkeys(seconds, 0.0)
    in_flight = nothing(*seconds)
    ends: list[tuple[float, PeerId]] = []
    done: Counter[PeerId] = Counter()
    for number in range(total):
        if len(ends) >= under_way:
            now, peer = heapq.heappop(ends)
            in_flight[peer] -= 1
            routing.observe(peer, Observation(seconds[peer]), now)
            done[peer] += number >= total // 2
        chosen = routing.choose(now, in_flight, FIRST)
        assert chosen is not None
        in_flight[chosen] += 1
        free_at[chosen] = max(now, free_at[chosen]) + seconds[chosen]
        heapq.heappush(ends, (free_at[chosen] + behind_seconds, chosen))
    return done


@given(
    st.lists(st.floats(min_value=0.1, max_value=3.0), min_size=1, max_size=5),
    st.floats(min_value=0.0, max_value=3.0),
)
def test_where_all_have_enough_to_do_work_is_shared_in_proportion_to_rates(
    times: list[float], behind_seconds: float
) -> None:
    peers = {PeerId(f"p{i}"): t for i, t in enumerate(times)}
    rate = sum(1 / t for t in times)
    # As many as are under way when nobody ever waits for work.
    under_way = len(peers) + math.ceil(rate * (behind_seconds + 2 * max(times)))
    total = 20 * under_way
    done = share_out(table(**peers), peers, under_way, total, behind_seconds)
    for peer, t in peers.items():
        share = (1 / t) / rate
        assert done[peer] == pytest.approx(share * total / 2, rel=0.3, abs=3 + max(times) / t)


def test_a_slow_peer_gets_nothing_while_a_fast_one_would_be_done_sooner_even_so() -> None:
    routing = table(a=0.1, b=1.0)
    assert [routing.choose(0.0, {A: n, B: 0}, FIRST) for n in (0, 8, 10)] == [A, A, B]


def test_equal_delays_are_broken_by_the_generator_and_what_was_missed_is_not_made_up_for() -> None:
    choices = []
    for seed in (1, 1, 2):
        routing = unplanned(A, B, seed=seed)
        for _ in range(20):  # b has no room
            assert routing.choose(0.0, nothing(A), FIRST) == A
        choices.append([routing.choose(0.0, nothing(A, B), FIRST) for _ in range(40)])
        assert 8 <= choices[-1].count(A) <= 32
    assert choices[0] == choices[1] != choices[2]


def test_an_estimate_ages_towards_the_roster_so_that_an_idle_slow_peer_gets_nothing_more() -> None:
    """Forgetting towards zero gave each slow peer a microbatch after every pause of 15 s."""
    routing = StageRouting(random.Random(1), 1)
    routing.update({A: 1.0, B: 1 / 20})
    routing.observe(A, Observation(1.0), 0.0)
    routing.observe(B, Observation(20.0), 0.0)
    for now in (0.0, 15.0, 150.0, 1e6):
        for in_flight in range(8):
            assert routing.choose(now, {A: in_flight, B: 0}, MicrobatchIndex(1)) == A
        assert routing.seconds_of(B, now) == pytest.approx(20.0)


def test_a_peer_that_had_a_bad_moment_is_tried_again() -> None:
    routing = StageRouting(random.Random(1), 1)
    routing.update({A: 1.0, B: 1.0})
    routing.observe(B, Observation(60.0), 0.0)
    assert routing.choose(0.0, {A: 3, B: 0}, MicrobatchIndex(1)) == A
    later = 6 * ESTIMATE_HALF_LIFE_SECONDS
    assert routing.seconds_of(B, later) == pytest.approx(1.0 + 59 / 64)
    assert routing.choose(later, {B: 0}, FIRST) == B


def step_of(senders: int, each: int, rates: dict[PeerId, float]) -> Counter[PeerId]:
    """All senders send all of their microbatches at once. How many each peer gets."""
    got: Counter[PeerId] = Counter()
    for sender in range(senders):
        routing = StageRouting(random.Random(sender), senders * each)
        routing.update(rates)
        in_flight = nothing(*rates)
        for number in range(each):
            chosen = routing.choose(0.0, in_flight, MicrobatchIndex(sender * each + number))
            assert chosen is not None
            in_flight[chosen] += 1
            got[chosen] += 1
    return got


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 40), st.booleans())
def test_identical_senders_do_not_herd_on_one_of_identical_peers(
    senders: int, each: int, peers: int, known: bool
) -> None:
    rates = dict.fromkeys((PeerId(f"p{n}") for n in range(peers)), 1.0 if known else 0.0)
    mean = senders * each / peers
    most = max(step_of(senders, each, rates).values())
    assert most <= (math.ceil(mean) if known else mean + 4 * max(1.0, math.sqrt(mean)))


@given(st.lists(st.floats(0.2, 5.0), min_size=1, max_size=20), st.integers(1, 200))
def test_senders_that_know_the_same_rates_share_the_peers_in_proportion_to_them(
    values: list[float], senders: int
) -> None:
    rates = {PeerId(f"p{n}"): value for n, value in enumerate(values)}
    got = step_of(senders, 1, rates)
    # List scheduling: whichever peer is last with its share, no other would have been done sooner.
    ends = {peer: (got[peer] + HANDICAP) / rate for peer, rate in rates.items() if got[peer]}
    for peer, rate in rates.items():
        assert max(ends.values()) <= (got[peer] + 1 + HANDICAP) / rate * (1 + 1e-9)


@given(st.lists(st.floats(0.2, 5.0), min_size=1, max_size=20), st.integers(1, 200))
def test_the_numbers_of_a_plan_follow_the_order_in_which_the_peers_are_done(
    seconds: list[float], microbatches: int
) -> None:
    plan = plan_step(tuple((PeerId(f"p{n}"), each) for n, each in enumerate(seconds)), microbatches)
    assert len(plan) == microbatches
    got: Counter[PeerId] = Counter()
    done_at: list[float] = []
    for peer in plan:
        got[peer] += 1
        done_at.append(got[peer] * seconds[int(peer[1:])])
    assert all(later >= before * (1 - 1e-9) for before, later in itertools.pairwise(done_at))


def test_a_peer_without_a_rate_counts_with_the_mean() -> None:
    rates = dict.fromkeys((PeerId(f"p{n}") for n in range(10)), 1.0)
    assert step_of(130, 1, rates | {A: 0.0})[A] == pytest.approx(130 / 11, abs=2)


def test_a_sender_departs_from_the_plan_where_a_peer_is_banned_full_or_slower_for_this_sender() -> (
    None
):
    routing = StageRouting(random.Random(1), 3)
    routing.update({A: 1.0, B: 1.0, C: 1.0})
    planned = [MicrobatchIndex(m) for m in range(3)]
    assert [routing.choose(0.0, {A: 9, B: 9, C: 9}, m) for m in planned] == [A, B, C]
    assert routing.choose(0.0, nothing(B), FIRST) == B
    routing.failed(A, 0.0)
    assert routing.choose(0.1, nothing(A, B), FIRST) == B
    routing.observe(A, Observation(2.5), 1.0)  # which lifts the ban
    assert routing.choose(1.0, nothing(A, B), FIRST) == B
    for _ in range(3):
        routing.observe(A, Observation(1.0), 1.0)
    assert routing.choose(1.0, nothing(A, B), FIRST) == A


@pytest.mark.parametrize("others", [{A: 1.0, B: 1.0}, {A: 1.0}])
def test_a_peer_that_the_plan_leaves_out_is_tried_with_the_first_microbatch_now_and_then(
    others: dict[PeerId, float],
) -> None:
    routing = StageRouting(random.Random(1), 8)
    routing.update(others | {C: 0.01})
    steps = [
        [routing.choose(0.0, nothing(*others, C), MicrobatchIndex(m)) for m in range(8)]
        for _ in range(200)
    ]
    firsts = Counter(step[0] for step in steps)
    assert firsts[C] == pytest.approx(200 * PROBE_SHARE, abs=20)
    assert all(C not in step[1:] for step in steps)


def test_once_no_rate_is_known_there_is_neither_a_plan_nor_a_peer_that_it_leaves_out() -> None:
    routing = StageRouting(random.Random(1), 8)
    routing.update({A: 1.0, C: 0.01})
    routing.choose(0.0, nothing(A, C), FIRST)
    routing.update({A: 0.0, C: 0.0})
    assert {routing.choose(0.0, nothing(A, C), FIRST) for _ in range(100)} == {A, C}


@given(
    st.lists(
        st.tuples(
            st.floats(min_value=0, max_value=5),
            st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 9)),
            st.none() | st.sampled_from([A, B, C]),
        ),
        max_size=30,
    )
)
def test_a_choice_comes_from_those_offered_and_a_single_peer_always_serves(
    moments: list[tuple[float, dict[PeerId, int], PeerId | None]],
) -> None:
    routing = table(a=1.0, b=2.0, c=3.0)
    only = unplanned(A)
    now = 0.0
    for pause, offered, failing in moments:
        now += pause
        if failing is not None:
            routing.failed(failing, now)
        chosen = routing.choose(now, offered, FIRST)
        assert chosen is None or chosen in offered
        assert (
            routing.choose(now, nothing(A, B, C), FIRST) is not None
        )  # the stage never becomes empty
        only.failed(A, now)
        assert only.choose(now, nothing(A), FIRST) == A


def test_a_newcomer_does_not_get_everything() -> None:
    routing = table(a=1.0, b=1.0)
    routing.update(dict.fromkeys([A, B, C], 0.0))
    in_flight = {A: 3, B: 3, C: 0}
    for _ in range(30):
        chosen = routing.choose(0.0, in_flight, FIRST)
        assert chosen is not None
        in_flight[chosen] += 1
    assert max(in_flight.values()) - min(in_flight.values()) <= 2


def test_a_failing_peer_is_passed_over_for_longer_each_time_and_forgiven_after_success() -> None:
    routing = table(a=1.0, b=1.0)
    routing.failed(A, 0.0)
    assert {routing.choose(0.5 * FIRST_BAN_SECONDS, nothing(A, B), FIRST) for _ in range(4)} == {B}
    assert A in {routing.choose(1.1 * FIRST_BAN_SECONDS, nothing(A, B), FIRST) for _ in range(9)}
    for _ in range(2_000):  # for days
        routing.failed(A, 10.0)
    assert routing.next_ban_end(10.0) == pytest.approx(10.0 + MAX_BAN_SECONDS)
    routing.observe(A, Observation(1.0), 10.0)
    assert routing.next_ban_end(10.0) is None


def test_who_refuses_is_passed_over_until_it_may_have_room_again() -> None:
    routing = table(a=0.5, b=5.0)
    routing.refused(A, 0.0)
    assert routing.choose(0.1, nothing(A, B), FIRST) == B
    assert routing.choose(0.6, nothing(A, B), FIRST) == A
    routing.refused(A, 0.6)
    routing.refused(B, 0.6)
    assert routing.choose(0.7, nothing(A), FIRST) == A, (
        "nobody is left: the stage must not become empty"
    )


def test_when_only_banned_peers_have_room_the_sender_waits_for_a_good_one() -> None:
    routing = table(a=1.0, b=1.0)
    routing.failed(A, 0.0)
    assert routing.choose(0.1, nothing(A), FIRST) is None  # b is only out of credits
    routing.failed(B, 0.0)
    assert (
        routing.choose(0.1, nothing(A), FIRST) == A
    )  # nobody is left: the stage must not become empty


def test_peers_that_leave_are_forgotten_and_unmeasured_ones_count_with_the_mean() -> None:
    routing = table(a=2.0, b=4.0)
    routing.update(dict.fromkeys([A, B, C], 0.0))
    assert routing.seconds_of(C, 0.0) == pytest.approx(3.0)
    routing.update({B: 0.0})
    assert routing.choose(0.0, nothing(A), FIRST) is None
    assert routing.choose(0.0, nothing(B, C), FIRST) == B


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(Observation(0.5), 0.5, id="its device"),
        pytest.param(Observation(0.5, uplink_seconds=0.8), 0.8, id="its line"),
        pytest.param(Observation(0.5, 0.8, link_seconds=3.0), 2.0, id="the link to it"),
        pytest.param(Observation(0.5, 0.8, 3.0, in_flight=2), 1.0, id="the link that two share"),
        pytest.param(Observation(0.5, 0.8, 3.0, in_flight=9), 0.8, id="a link that many share"),
    ],
)
def test_a_peer_is_as_fast_as_the_slowest_of_its_device_its_line_and_the_link(
    seen: Observation, expected: float
) -> None:
    routing = unplanned(A, B)
    # What it takes to the other as well is the sender's own line.
    routing.observe(B, Observation(1.0, link_seconds=1.0), 0.0)
    routing.observe(A, seen, 0.0)
    assert routing.seconds_of(A, 0.0) == pytest.approx(expected)


def test_a_sender_with_a_slow_line_still_tells_fast_peers_from_slow_ones() -> None:
    routing = table(a=1.0, b=1.0)
    for _ in range(40):
        routing.observe(A, Observation(0.1, link_seconds=4.0, in_flight=1), 0.0)
        routing.observe(B, Observation(0.4, link_seconds=4.0, in_flight=1), 0.0)
    assert routing.seconds_of(A, 0.0) == pytest.approx(0.1, abs=0.01)
    assert routing.seconds_of(B, 0.0) == pytest.approx(0.4, abs=0.01)
