"""The rates of a device that takes time for copies and products: measured, and as a stage that
streams its weights lives by them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kits.client.device_pipeline import Pipeline, comparable
from kits.client.fake_accelerator import FakeAccelerator, TimedOrder
from kits.client.stage_runners import make_manifest
from swarm_client.machine.devices import DeviceRates
from swarm_client.stage.worker import accelerator as door
from swarm_shared.base.memory import MachineBalance, StreamedWork
from swarm_shared.base.types import MicrobatchIndex, Step
from swarm_shared.run.manifest import CodecsConfig
from swarm_shared.run.stage_cut import LayerMatrices

UP, DOWN = 4e9, 3e9
FLOPS = {torch.float32: 1e9, torch.bfloat16: 8e9}
FIRST_CALL_SECONDS = 0.3
"""Of each kind of product, in which kernels are loaded."""


class WarmingUp(TimedOrder):
    def __init__(self) -> None:
        super().__init__(UP, DOWN, FLOPS)
        self._loaded: set[torch.dtype] = set()

    def seconds(self, reads: Sequence[Tensor], written: Tensor) -> float:
        seconds = super().seconds(reads, written)
        if len(reads) < 2 or written.dtype in self._loaded:
            return seconds
        self._loaded.add(written.dtype)
        return seconds + FIRST_CALL_SECONDS


def test_a_device_is_measured_as_fast_as_it_is_in_less_than_half_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "PRODUCT_SIZE", 64)
    order = WarmingUp()
    accelerator = FakeAccelerator("cuda", order)
    with accelerator.at_work():
        rates = door.measured_rates(accelerator, order.now)
    assert rates == DeviceRates(pytest.approx(DOWN), pytest.approx(1e9), pytest.approx(8e9))
    assert rates is not None
    balance = (rates.balance.float32, rates.balance.bfloat16)
    assert balance == pytest.approx((1 / 3, 8 / 3))
    assert order.now() < 2 * FIRST_CALL_SECONDS + 0.3


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, torch.OutOfMemoryError])
def test_a_device_that_cannot_be_measured_has_unknown_rates(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int) -> Tensor:
        raise error("no pinned memory")

    accelerator = FakeAccelerator("cuda")
    monkeypatch.setattr(accelerator.fake_streams, "pinned", refuse)
    with accelerator.at_work():
        assert door.measured_rates(accelerator) is None


def test_what_computes_in_the_hosts_memory_is_not_measured() -> None:
    assert door.measured_rates(door.processor()) is None
    assert door.measured_rates(FakeAccelerator("mps")) is None


# ---------------------------------------------------------------- stages


def microbatch_seconds(copies_over_products: float, *, streamed: bool) -> float:
    """How long a microbatch takes of a stage whose layers are computed again, all of whose matrices
    are on the device or streamed."""
    manifest = comparable(make_manifest(1))
    training = manifest.training.model_copy(update={"sequences_per_microbatch": 5})
    manifest = manifest.model_copy(
        update={"training": training, "codecs": CodecsConfig(average="exact")}
    )
    # A weight takes 4 bytes, and 2 FLOPs for each token.
    rate = 2 * FLOPS[torch.float32] / (manifest.tokens_per_microbatch * copies_over_products)
    order = TimedOrder(rate, rate, FLOPS)
    accelerator = FakeAccelerator("cuda", order)
    matrices = LayerMatrices.of(manifest.model)
    streamed_bytes = matrices.streamable_bytes(manifest.model.layers, 0) if streamed else 0
    with accelerator.at_work():
        pipeline = Pipeline(manifest, accelerator, 0, streamed_bytes)
        ends: list[float] = []
        for number in range(4):
            pipeline.microbatch(Step(1), MicrobatchIndex(number))
            accelerator.synchronise()
            ends.append(order.now())
    return (ends[-1] - ends[1]) / 2


@pytest.mark.parametrize("copies_over_products", [0.25, 0.5, 1.0, 1.5, 2.0, 3.0])
def test_a_stage_that_streams_its_weights_is_as_slow_as_predicted(
    copies_over_products: float,
) -> None:
    resident, streamed = (
        microbatch_seconds(copies_over_products, streamed=streamed) for streamed in (False, True)
    )
    balance = MachineBalance(float32=copies_over_products, bfloat16=1.0)
    predicted = StreamedWork(intensity=1.0).slowdown(balance, recomputed=True)
    assert streamed / resident == pytest.approx(predicted, rel=0.1)
