"""When a p2pd that runs is started again: for other relays, and for one that it has lost."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from swarm_client.averaging.handle.restart_policy import (
    INTERVAL_SECONDS,
    LOST_RELAY_SECONDS,
    MAX_LOST_RELAY_SECONDS,
    PATIENCE_SECONDS,
    SETTLE_SECONDS,
    RestartPolicy,
)

LOOK_SECONDS = 0.5


class Life:
    """A policy that is asked twice a second; records its reasons."""

    def __init__(self) -> None:
        self.policy = RestartPolicy()
        self.now = 0.0
        self.restarts: list[tuple[float, str]] = []

    def go(
        self, seconds: float, *, differs: bool = False, misses_relay: bool = False,
        busy: bool = False, until_restart: bool = False,
    ) -> None:  # fmt: skip
        end = self.now + seconds
        while self.now < end:
            self.now += LOOK_SECONDS
            reason = self.policy.restart_reason(
                self.now, differs=differs, misses_relay=misses_relay, busy=busy
            )
            if reason:
                self.restarts.append((self.now, reason))
                if until_restart:
                    return


def test_another_way_to_run_it_takes_effect_once_it_has_settled() -> None:
    life = Life()
    life.go(100)
    life.go(100, differs=True, until_restart=True)
    assert [why for _, why in life.restarts] == ["the options of p2pd have changed"]
    assert life.restarts[0][0] - 100 <= SETTLE_SECONDS + 2 * LOOK_SECONDS


def test_what_is_taken_back_soon_restarts_nothing() -> None:
    life = Life()
    for _ in range(20):
        life.go(SETTLE_SECONDS / 2, differs=True)
        life.go(1)
    assert life.restarts == []


def test_changes_that_keep_coming_restart_it_once_a_minute() -> None:
    life = Life()
    life.go(10 * INTERVAL_SECONDS, differs=True)
    gaps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(life.restarts)]
    assert min(gaps) >= INTERVAL_SECONDS
    assert len(life.restarts) == 10


def test_rounds_hold_a_restart_up_but_not_for_ever() -> None:
    life = Life()
    life.go(PATIENCE_SECONDS / 2, differs=True, busy=True)
    assert life.restarts == []
    life.go(LOOK_SECONDS, differs=True)
    assert len(life.restarts) == 1
    other = Life()
    other.go(2 * PATIENCE_SECONDS, differs=True, busy=True, until_restart=True)
    assert PATIENCE_SECONDS <= other.restarts[0][0] <= PATIENCE_SECONDS + SETTLE_SECONDS + 1


def test_a_lost_relay_is_worth_a_restart_and_less_and_less_of_one_when_that_does_not_help() -> None:
    life = Life()
    life.go(LOST_RELAY_SECONDS - 1, misses_relay=True)
    life.go(1)
    assert life.restarts == []
    life.go(6 * 3600, misses_relay=True)
    assert {why for _, why in life.restarts} == {"p2pd has lost its relay"}
    gaps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(life.restarts)]
    assert gaps == sorted(gaps)
    assert MAX_LOST_RELAY_SECONDS <= gaps[-1] <= MAX_LOST_RELAY_SECONDS + 1
    # Reached again, and lost again later: that is a new story.
    life.go(100)
    begun = life.now
    life.go(LOST_RELAY_SECONDS + 1, misses_relay=True, until_restart=True)
    assert life.restarts[-1][0] > begun


@given(
    st.lists(
        st.tuples(st.floats(0.1, 200), st.booleans(), st.booleans(), st.booleans()), max_size=40
    )
)
def test_whatever_happens_restarts_are_a_minute_apart(
    events: list[tuple[float, bool, bool, bool]],
) -> None:
    life = Life()
    for seconds, differs, misses_relay, busy in events:
        life.go(seconds, differs=differs, misses_relay=misses_relay, busy=busy)
    times = [at for at, _ in life.restarts]
    assert all(b - a >= INTERVAL_SECONDS for a, b in itertools.pairwise(times))
