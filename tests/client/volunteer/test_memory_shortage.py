"""What a volunteer offers while its device lacks memory for a stage."""

from __future__ import annotations

from pathlib import Path

import trio
from hypothesis import given
from hypothesis import strategies as st

from client.volunteer.test_volunteer_admission import SMALL, scene
from swarm_client.control.status_document import SuspendReason
from swarm_client.control.status_sentence import Suspension
from swarm_client.volunteer.memory_shortage import (
    FIRST_SHORTAGE_SECONDS,
    MAX_SHORTAGE_SECONDS,
    MemoryShortage,
)
from swarm_shared.base.backoff import Backoff
from swarm_shared.base.memory import MemoryOffer, StageMemory

SIZES = st.integers(1, 2**40)
STAGES = st.builds(
    lambda least, more, host: StageMemory(
        device_bytes=least, comfortable_bytes=least + more, host_bytes=host
    ),
    SIZES, SIZES, st.integers(0, 2**40),
)  # fmt: skip
OFFERS = st.builds(
    MemoryOffer, device_bytes=st.integers(0, 2**42), host_bytes=st.none() | st.integers(0, 2**42)
)


@given(stage=STAGES, offer=OFFERS, began=st.floats(0, 1e6), share=st.floats(0, 0.99))
def test_until_the_shortage_ends_the_stage_does_not_fit_and_smaller_ones_do(
    stage: StageMemory, offer: MemoryOffer, began: float, share: float
) -> None:
    shortage = MemoryShortage()
    assert shortage.remaining(offer, began) == offer
    shortage.began(stage, began)
    during = began + share * FIRST_SHORTAGE_SECONDS
    left = shortage.remaining(offer, during)
    assert not left.holds(stage)
    smaller = stage.model_copy(update={"device_bytes": stage.device_bytes - 1})
    assert left.holds(smaller) == offer.holds(smaller)
    assert shortage.remaining(offer, began + FIRST_SHORTAGE_SECONDS + 1) == offer


def test_shortages_that_follow_each_other_last_longer_each_time_and_a_long_calm_forgives() -> None:
    shortage, stage, now = MemoryShortage(), StageMemory(device_bytes=1), 5.0
    lengths = []
    for _ in range(8):
        shortage.began(stage, now)
        lengths.append(shortage.seconds_left(now))
        now += lengths[-1]
    assert lengths[:3] == [FIRST_SHORTAGE_SECONDS * factor for factor in (1, 2, 4)]
    assert lengths[-1] == MAX_SHORTAGE_SECONDS
    assert shortage.seconds_left(now) == 0
    shortage.began(stage, now + MAX_SHORTAGE_SECONDS + 1)
    assert shortage.seconds_left(now + MAX_SHORTAGE_SECONDS + 1) == FIRST_SHORTAGE_SECONDS


async def test_a_stage_is_handed_over_and_a_smaller_one_asked_for(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.script.sessions(1)
        larger = StageMemory(device_bytes=10 * SMALL.device_bytes)
        s.volunteer.context.options.shortage.began(larger, trio.current_time())
        await s.script.sessions(2)
        before, after = s.script.hellos
        assert before.memory.holds(larger)
        assert not after.memory.holds(larger)
        assert after.memory.holds(SMALL)
        assert s.volunteer.suspended is None


async def test_where_no_other_stage_fits_it_pauses_and_asks_again_with_all_of_its_memory(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as s:
        await s.script.sessions(1)
        options = s.volunteer.context.options
        options.shortage._backoff = Backoff(2.0, 2.0)
        options.shortage.began(SMALL, trio.current_time())
        await s.until(lambda: s.volunteer.suspended is not None)
        assert s.volunteer.suspended.reason is SuspendReason.MEMORY_SHORT
        assert len(s.script.hellos) == 1
        await s.script.sessions(2)
        assert s.volunteer.suspended is None
        assert s.script.hellos[1].memory == s.script.hellos[0].memory


async def test_where_the_preferences_leave_too_little_it_pauses_until_they_leave_more(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as s:
        await s.script.sessions(1)
        options = s.volunteer.context.options
        enough = options.device.memory
        s.volunteer.offer_memory(enough.replaced(SMALL.device_bytes))  # and the host's part
        options.shortage.offer_fell()  # as the manager of the held stage says
        await s.until(lambda: s.volunteer.suspended is not None)
        assert s.volunteer.suspended == Suspension(SuspendReason.MEMORY_SHORT)
        s.volunteer.offer_memory(enough.replaced(SMALL.device_bytes + 1))
        assert s.volunteer.suspended is not None, "that is still too little"
        assert len(s.script.hellos) == 1
        s.volunteer.offer_memory(enough)
        assert s.volunteer.suspended is None
        await s.script.sessions(2)
        assert s.script.hellos[1].memory == enough


async def test_a_pause_by_the_user_outlives_the_shortage(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.script.sessions(1)
        options = s.volunteer.context.options
        options.shortage.began(SMALL, trio.current_time())
        await s.until(lambda: s.volunteer.suspended is not None)
        shortage = s.volunteer.suspended
        s.volunteer.suspend(SuspendReason.PAUSED_BY_USER)
        await s.volunteer._resume_after(0.0, shortage)
        assert s.volunteer.suspended.reason is SuspendReason.PAUSED_BY_USER


async def test_a_user_who_has_closed_the_other_program_need_not_wait(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        await s.script.sessions(1)
        s.volunteer.context.options.shortage.began(SMALL, trio.current_time())
        await s.until(lambda: s.volunteer.suspended is not None)
        s.volunteer.suspend(SuspendReason.PAUSED_BY_USER)
        s.volunteer.resume()
        await s.script.sessions(2)
        assert s.script.hellos[1].memory == s.script.hellos[0].memory
