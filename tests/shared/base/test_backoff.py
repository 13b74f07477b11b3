"""Back-off: pauses double up to a maximum, and an exponent never overflows."""

from __future__ import annotations

import pytest

from swarm_shared.base.backoff import Backoff, backoff_seconds, with_jitter


@pytest.mark.parametrize(
    ("earlier", "seconds"), [(0, 0.5), (1, 1.0), (3, 4.0), (4, 5.0), (10**6, 5.0), (-1, 0.5)]
)
def test_a_pause_doubles_with_each_failure_up_to_the_maximum(earlier: int, seconds: float) -> None:
    assert backoff_seconds(earlier, 0.5, 5.0) == seconds


def test_a_retry_loop_starts_again_at_the_first_pause_after_a_success() -> None:
    backoff = Backoff(1.0, 3.0)
    assert [backoff.next() for _ in range(4)] == [1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.next() == 1.0


def test_jitter_stays_within_its_share() -> None:
    pauses = [with_jitter(10.0, 0.2) for _ in range(200)]
    assert all(8.0 <= pause <= 12.0 for pause in pauses)
    assert max(pauses) > min(pauses)
