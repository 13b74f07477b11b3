"""The memory of stages and machines: what fits, and how fast it is computed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kits.memory import WORK
from swarm_shared.base.memory import (
    DEFAULT_BALANCE,
    FORWARD_SHARE,
    MachineBalance,
    MemoryOffer,
    StageMemory,
    StreamedWork,
)
from swarm_shared.base.types import MAX_EXACT_INTEGER

STAGE = StageMemory(device_bytes=50, comfortable_bytes=90, host_bytes=100)
STREAMED = STAGE.model_copy(update={"streamable_bytes": 20, "stream_buffer_bytes": 5})
sizes = st.integers(0, 1000)
stages = st.builds(
    lambda streamable, fixed, more, host, buffers: StageMemory(
        device_bytes=streamable + fixed, comfortable_bytes=streamable + fixed + more,
        host_bytes=host, streamable_bytes=streamable, stream_buffer_bytes=buffers,
    ),
    sizes, sizes, sizes, sizes, sizes,
)  # fmt: skip
balances = st.none() | st.from_type(MachineBalance)
works = st.from_type(StreamedWork)
offers = st.builds(MemoryOffer, device_bytes=sizes, host_bytes=st.none() | sizes, balance=balances)


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


@pytest.mark.parametrize(("device_bytes", "share"), [(50, 0.0), (40, 0.6), (30, 1.0)])
def test_a_device_that_copies_weights_for_each_pass_is_slower_by_as_much_as_it_copies(
    device_bytes: int, share: float
) -> None:
    balance = MachineBalance(float32=100.0, bfloat16=300.0)
    offer = MemoryOffer(device_bytes=device_bytes, host_bytes=200, balance=balance)
    work = StreamedWork(intensity=100.0, dtype="bfloat16")
    slowest = offer.replaced(STAGE.device_bytes).speed(STREAMED, work)
    assert slowest == 1 / (1 + FORWARD_SHARE)
    # A pass of copies takes as long as three of products; gradients are hashed in either case.
    slowdown = (3 + 3 + 3 + 3) / (1 + 1 + 2 + 3)
    assert offer.speed(STREAMED, work) == pytest.approx(slowest / (1 + share * (slowdown - 1)))


def test_half_precision_is_faster_and_copies_as_much() -> None:
    balance = MachineBalance(float32=100.0, bfloat16=300.0)
    slowdowns = [
        StreamedWork(intensity=100.0, dtype=dtype).slowdown(balance, recomputed=True)
        for dtype in ("float32", "bfloat16")
    ]
    assert slowdowns == [1.0, 12 / 7]
    frozen = StreamedWork(intensity=100.0, are_frozen=True)
    assert frozen.slowdown(balance, recomputed=True) == 1.0, "no gradient leaves or comes back"


@given(balances, works, st.floats(1, 1e6), st.booleans())
def test_more_tokens_never_make_streamed_weights_slower(
    balance: MachineBalance | None, work: StreamedWork, more: float, recomputed: bool
) -> None:
    longer = work.model_copy(update={"intensity": work.intensity * more})
    slowdown = longer.slowdown(balance, recomputed=recomputed)
    rounding = 1 + 1e-12
    assert 1 <= slowdown <= work.slowdown(balance, recomputed=recomputed) * rounding


@given(works, st.booleans())
def test_a_device_of_unknown_rates_is_a_common_card(work: StreamedWork, recomputed: bool) -> None:
    card = MachineBalance(float32=DEFAULT_BALANCE, bfloat16=DEFAULT_BALANCE)
    assert work.slowdown(None, recomputed=recomputed) == work.slowdown(card, recomputed=recomputed)


@given(offers, stages, works)
def test_a_speed_is_a_share_and_rates_matter_only_where_weights_are_streamed(
    offer: MemoryOffer, stage: StageMemory, work: StreamedWork
) -> None:
    speed = offer.speed(stage, work)
    assert 0 < speed <= 1
    if not offer.streamed_bytes(stage):
        unmeasured = offer.model_copy(update={"balance": None})
        assert unmeasured.speed(stage, StreamedWork(intensity=1.0)) == speed


@pytest.mark.parametrize("value", [0, -1.0, 1e16, 1e-300, "inf", "nan", None, [1.0]])
def test_a_balance_from_the_network_is_a_bounded_positive_number(value: object) -> None:
    sent = {"device_bytes": 1, "balance": {"float32": value, "bfloat16": 1.0}}
    with pytest.raises(ValidationError):
        MemoryOffer.model_validate_json(json.dumps(sent))


@pytest.mark.parametrize(
    ("device_bytes", "speed"),
    [(50, 1 / (1 + FORWARD_SHARE)), (70, 1 / (1 + FORWARD_SHARE / 2)), (90, 1.0), (500, 1.0)],
)
def test_a_machine_with_little_memory_computes_the_forward_pass_twice(
    device_bytes: int, speed: float
) -> None:
    offer = MemoryOffer(device_bytes=device_bytes, host_bytes=100)
    assert offer.speed(STAGE, WORK) == pytest.approx(speed)
    in_one = MemoryOffer(device_bytes=device_bytes + 100)
    assert in_one.speed(STAGE, WORK) == offer.speed(STAGE, WORK)


@given(offers, stages, stages, sizes, works)
def test_what_holds_two_stages_holds_each_and_more_memory_is_never_slower(
    offer: MemoryOffer, one: StageMemory, other: StageMemory, more: int, work: StreamedWork
) -> None:
    if offer.holds(one + other):
        assert offer.holds(one)
        assert offer.holds(other)
    larger = offer.replaced(offer.device_bytes + more)
    assert larger.holds(one) or not offer.holds(one)
    assert larger.speed(one, work) >= offer.speed(one, work)


def test_the_sum_of_two_hostile_figures_is_a_figure() -> None:
    most = StageMemory(device_bytes=MAX_EXACT_INTEGER, host_bytes=MAX_EXACT_INTEGER)
    assert (most + most).device_bytes == MAX_EXACT_INTEGER


def test_texts_name_both_memories_where_there_are_two() -> None:
    assert str(MemoryOffer(device_bytes=2**30)) == "1 GiB of memory"
    both = "1 GiB of device memory and 2 GiB of the host's"
    assert str(MemoryOffer(device_bytes=2**30, host_bytes=2**31)) == both
    assert str(StageMemory(device_bytes=2**30, host_bytes=2**31)) == both
