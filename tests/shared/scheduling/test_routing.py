"""The shortest expected delay gives work in proportion to rates and never starves a stage."""

from __future__ import annotations

import heapq
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.base.types import PeerId
from swarm_shared.scheduling.routing import (
    FIRST_BAN_SECONDS,
    IDLE_HALF_LIFE_SECONDS,
    MAX_BAN_SECONDS,
    Observation,
    ShortestExpectedDelay,
)

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def table(**seconds: float) -> ShortestExpectedDelay:
    routing = ShortestExpectedDelay()
    routing.update([PeerId(name) for name in seconds])
    for name, value in seconds.items():
        routing.observe(PeerId(name), Observation(value), 0.0)
    return routing


def nothing(*peers: PeerId) -> dict[PeerId, int]:
    return dict.fromkeys(peers, 0)


def share_out(
    routing: ShortestExpectedDelay, seconds: dict[PeerId, float], under_way: int, total: int,
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
        chosen = routing.choose(now, in_flight)
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
    assert [routing.choose(0.0, {A: n, B: 0}) for n in (0, 8, 10)] == [A, A, B]


def test_equal_peers_take_turns_and_what_was_missed_is_not_made_up_for() -> None:
    routing = table(a=1.0, b=1.0)
    assert [routing.choose(0.0, nothing(A, B)) for _ in range(4)] == [A, B, A, B]
    for _ in range(20):  # b has no room
        assert routing.choose(0.0, nothing(A)) == A
    assert Counter(routing.choose(0.0, nothing(A, B)) for _ in range(20)) == {A: 10, B: 10}


def test_a_peer_that_had_a_bad_moment_is_tried_again() -> None:
    routing = table(a=1.0, b=60.0)
    assert routing.choose(0.0, {A: 3, B: 0}) == A
    routing.observe(A, Observation(1.0), 5 * IDLE_HALF_LIFE_SECONDS)
    assert routing.choose(5 * IDLE_HALF_LIFE_SECONDS, {A: 3, B: 0}) == B
    assert routing.choose(5 * IDLE_HALF_LIFE_SECONDS, {A: 3, B: 1}) == A


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
    only = ShortestExpectedDelay()
    only.update([A])
    now = 0.0
    for pause, offered, failing in moments:
        now += pause
        if failing is not None:
            routing.failed(failing, now)
        chosen = routing.choose(now, offered)
        assert chosen is None or chosen in offered
        assert routing.choose(now, nothing(A, B, C)) is not None  # the stage never becomes empty
        only.failed(A, now)
        assert only.choose(now, nothing(A)) == A


def test_a_newcomer_does_not_get_everything() -> None:
    routing = table(a=1.0, b=1.0)
    routing.update([A, B, C])
    in_flight = {A: 3, B: 3, C: 0}
    for _ in range(30):
        chosen = routing.choose(0.0, in_flight)
        assert chosen is not None
        in_flight[chosen] += 1
    assert in_flight == nothing(A, B, C) | {A: 12, B: 12, C: 12}


def test_a_failing_peer_is_passed_over_for_longer_each_time_and_forgiven_after_success() -> None:
    routing = table(a=1.0, b=1.0)
    routing.failed(A, 0.0)
    assert {routing.choose(0.5 * FIRST_BAN_SECONDS, nothing(A, B)) for _ in range(4)} == {B}
    assert A in {routing.choose(1.1 * FIRST_BAN_SECONDS, nothing(A, B)) for _ in range(9)}
    for _ in range(2_000):  # for days
        routing.failed(A, 10.0)
    assert routing.next_ban_end(10.0) == pytest.approx(10.0 + MAX_BAN_SECONDS)
    routing.observe(A, Observation(1.0), 10.0)
    assert routing.next_ban_end(10.0) is None


def test_who_refuses_is_passed_over_until_it_may_have_room_again() -> None:
    routing = table(a=0.5, b=5.0)
    routing.refused(A, 0.0)
    assert routing.choose(0.1, nothing(A, B)) == B
    assert routing.choose(0.6, nothing(A, B)) == A
    routing.refused(A, 0.6)
    routing.refused(B, 0.6)
    assert routing.choose(0.7, nothing(A)) == A, "nobody is left: the stage must not become empty"


def test_when_only_banned_peers_have_room_the_sender_waits_for_a_good_one() -> None:
    routing = table(a=1.0, b=1.0)
    routing.failed(A, 0.0)
    assert routing.choose(0.1, nothing(A)) is None  # b is only out of credits
    routing.failed(B, 0.0)
    assert routing.choose(0.1, nothing(A)) == A  # nobody is left: the stage must not become empty


def test_peers_that_leave_are_forgotten_and_unmeasured_ones_count_with_the_mean() -> None:
    routing = table(a=2.0, b=4.0)
    routing.update([A, B, C])
    assert routing.seconds_of(C) == pytest.approx(3.0)
    routing.update([B])
    assert routing.choose(0.0, nothing(A)) is None
    assert set(routing.peers) == {B}


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
    routing = ShortestExpectedDelay()
    routing.update([A, B])
    # What it takes to the other as well is the sender's own line.
    routing.observe(B, Observation(1.0, link_seconds=1.0), 0.0)
    routing.observe(A, seen, 0.0)
    assert routing.seconds_of(A) == pytest.approx(expected)


def test_a_sender_with_a_slow_line_still_tells_fast_peers_from_slow_ones() -> None:
    routing = table(a=1.0, b=1.0)
    for _ in range(40):
        routing.observe(A, Observation(0.1, link_seconds=4.0, in_flight=1), 0.0)
        routing.observe(B, Observation(0.4, link_seconds=4.0, in_flight=1), 0.0)
    assert routing.seconds_of(A) == pytest.approx(0.1, abs=0.01)
    assert routing.seconds_of(B) == pytest.approx(0.4, abs=0.01)
