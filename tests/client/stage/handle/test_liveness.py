"""When a worker counts as hung, on a clock of the test's own."""

from __future__ import annotations

import trio
import trio.testing

from swarm_client.stage.handle.liveness import (
    CHECK_INTERVAL_SECONDS,
    FIRST_COMPUTATION_SECONDS,
    HUNG_FACTOR,
    HUNG_SECONDS,
    STORAGE_TIMEOUT_SECONDS,
    Liveness,
    Outstanding,
)


def hung_after(
    liveness: Liveness, owes: Outstanding, limit_seconds: float = 2000.0
) -> float | None:
    """Virtual seconds until the worker counts as hung; None when it does not."""

    async def main() -> float | None:
        with trio.move_on_after(limit_seconds):
            await liveness.wait_hung(lambda: owes)
            return trio.current_time()
        return None

    clock = trio.testing.MockClock(autojump_threshold=0)
    began = clock.current_time()
    ended = trio.run(main, clock=clock)
    return None if ended is None else ended - began


def answered(*seconds: float) -> Liveness:
    liveness = Liveness()
    for one in seconds:
        liveness.answered(one)
    return liveness


def test_a_worker_without_outstanding_requests_never_hangs() -> None:
    assert hung_after(answered(0.1), Outstanding.NOTHING) is None


def test_a_fast_worker_that_is_silent_for_seconds_has_hung() -> None:
    assert hung_after(answered(0.1, 0.05), Outstanding.COMPUTING) == HUNG_SECONDS


def test_a_slow_worker_is_given_many_times_its_slowest_computation() -> None:
    assert hung_after(answered(0.1, 2.0), Outstanding.COMPUTING) == 2.0 * HUNG_FACTOR
    # The first computation of a process is slow and does not predict the others.
    assert hung_after(answered(2.0, *[0.1] * 20), Outstanding.COMPUTING) == HUNG_SECONDS


def test_the_first_of_a_kind_of_computation_and_storage_are_given_minutes() -> None:
    assert hung_after(answered(0.1), Outstanding.FIRST) == FIRST_COMPUTATION_SECONDS
    assert hung_after(answered(0.1), Outstanding.STORAGE) == STORAGE_TIMEOUT_SECONDS


def test_an_answer_starts_the_count_anew() -> None:
    liveness = answered(0.1)

    async def main() -> float:
        async with trio.open_nursery() as nursery:

            async def go_on() -> None:
                for _ in range(5):
                    await trio.sleep(HUNG_SECONDS - 2 * CHECK_INTERVAL_SECONDS)
                    liveness.answered()

            nursery.start_soon(go_on)
            began = trio.current_time()
            await liveness.wait_hung(lambda: Outstanding.COMPUTING)
            return trio.current_time() - began

    seconds = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert seconds > 5 * (HUNG_SECONDS - 2 * CHECK_INTERVAL_SECONDS)
