"""For how long peers are refused on whose events the core has failed."""

from __future__ import annotations

import pytest

from kits.peer_names import named
from swarm_coordinator.server.core_failures import (
    FIRST_REFUSAL_SECONDS,
    MAX_REFUSAL_SECONDS,
    CoreFailures,
    RefusedForNow,
)

AUTHOR, OTHER = named("author"), named("xther")


def test_a_peer_is_refused_twice_as_long_each_time_and_others_are_not() -> None:
    failures, now = CoreFailures(), 1000.0
    failures.check(AUTHOR, now)
    for expected in (60.0, 120.0, 240.0):
        assert failures.failed_on(AUTHOR, now) == expected
        with pytest.raises(RefusedForNow) as caught:
            failures.check(AUTHOR, now + 1)
        assert caught.value.retry_seconds == expected - 1
        failures.check(OTHER, now + 1)
        now += expected
        failures.check(AUTHOR, now)


def test_no_refusal_is_longer_than_a_day() -> None:
    failures = CoreFailures()
    found = [failures.failed_on(AUTHOR, 0.0) for _ in range(40)]
    assert found[0] == FIRST_REFUSAL_SECONDS
    assert found[-1] == MAX_REFUSAL_SECONDS
