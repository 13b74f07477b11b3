"""The memory of stages and machines: what fits, and how fast it is computed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.base.memory import FORWARD_SHARE, STREAMED_SPEED, MemoryOffer, StageMemory
from swarm_shared.base.types import MAX_EXACT_INTEGER

STAGE = StageMemory(device_bytes=50, comfortable_bytes=90, host_bytes=100)
STREAMED = STAGE.model_copy(update={"streamable_bytes": 20, "stream_buffer_bytes": 5})
sizes = st.integers(0, 1000)
stages = st.builds(
    lambda least, more, host, streamable: StageMemory(
        device_bytes=least, comfortable_bytes=least + more, host_bytes=host,
        streamable_bytes=streamable,
    ),
    sizes, sizes, sizes, sizes,
)  # fmt: skip
offers = st.builds(MemoryOffer, device_bytes=sizes, host_bytes=st.none() | sizes)


@pytest.mark.parametrize(
    ("device_bytes", "host_bytes", "fits"),
    [(50, 100, True), (49, 100, False), (50, 99, False), (150, None, True), (149, None, False)],
)
def test_a_stage_needs_both_memories_or_their_sum_where_they_are_one(
    device_bytes: int, host_bytes: int | None, fits: bool
) -> None:
    assert MemoryOffer(device_bytes=device_bytes, host_bytes=host_bytes).holds(STAGE) is fits


@pytest.mark.parametrize(
    ("device_bytes", "host_bytes", "fits"),
    [(30, 125, True), (29, 126, False), (30, 124, False), (40, 115, True), (40, 114, False),
     (130, None, False), (150, None, True)],
)  # fmt: skip
def test_what_a_device_lacks_for_weights_is_taken_of_the_hosts_memory(
    device_bytes: int, host_bytes: int | None, fits: bool
) -> None:
    assert MemoryOffer(device_bytes=device_bytes, host_bytes=host_bytes).holds(STREAMED) is fits


@pytest.mark.parametrize(("device_bytes", "share"), [(50, 0.0), (40, 0.5), (30, 1.0)])
def test_a_device_that_copies_weights_for_each_pass_is_slower_by_as_much_as_it_copies(
    device_bytes: int, share: float
) -> None:
    offer = MemoryOffer(device_bytes=device_bytes, host_bytes=200)
    slowest = offer.replaced(STAGE.device_bytes).speed(STREAMED)
    assert slowest == pytest.approx(1 / (1 + FORWARD_SHARE))
    copied = 1 + share * (1 / STREAMED_SPEED - 1)
    assert offer.speed(STREAMED) == pytest.approx(slowest / copied)


@pytest.mark.parametrize(
    ("device_bytes", "speed"),
    [(50, 1 / (1 + FORWARD_SHARE)), (70, 1 / (1 + FORWARD_SHARE / 2)), (90, 1.0), (500, 1.0)],
)
def test_a_machine_with_little_memory_computes_the_forward_pass_twice(
    device_bytes: int, speed: float
) -> None:
    offer = MemoryOffer(device_bytes=device_bytes, host_bytes=100)
    assert offer.speed(STAGE) == pytest.approx(speed)
    in_one = MemoryOffer(device_bytes=device_bytes + 100)
    assert in_one.speed(STAGE) == offer.speed(STAGE)


@given(offers, stages, stages, sizes)
def test_what_holds_two_stages_holds_each_and_more_memory_is_never_slower(
    offer: MemoryOffer, one: StageMemory, other: StageMemory, more: int
) -> None:
    if offer.holds(one + other):
        assert offer.holds(one)
        assert offer.holds(other)
    larger = offer.replaced(offer.device_bytes + more)
    assert larger.holds(one) or not offer.holds(one)
    assert larger.speed(one) >= offer.speed(one)


def test_the_sum_of_two_hostile_figures_is_a_figure() -> None:
    most = StageMemory(device_bytes=MAX_EXACT_INTEGER, host_bytes=MAX_EXACT_INTEGER)
    assert (most + most).device_bytes == MAX_EXACT_INTEGER


def test_texts_name_both_memories_where_there_are_two() -> None:
    assert str(MemoryOffer(device_bytes=2**30)) == "1 GiB of memory"
    both = "1 GiB of device memory and 2 GiB of the host's"
    assert str(MemoryOffer(device_bytes=2**30, host_bytes=2**31)) == both
    assert str(StageMemory(device_bytes=2**30, host_bytes=2**31)) == both
