"""The measurement of a device that copies and computes at known rates, in its own time."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from kits.client.fake_accelerator import (
    HOST,
    FakeAccelerator,
    FakeStream,
    FakeStreams,
    Order,
    device_of,
)
from swarm_client.machine.devices import DeviceRates
from swarm_client.stage.worker import accelerator as door

UP, DOWN = 4e9, 3e9
FLOPS = {torch.float32: 1e9, torch.bfloat16: 8e9}
FIRST_CALL_SECONDS = 0.3
"""Of each kind of product, in which kernels are loaded."""


class TimedOrder(Order):
    """Streams that work side by side, each for as long as its copies and products take."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._busy_until: dict[FakeStream, float] = {}
        self._loaded: set[torch.dtype] = set()

    def access(self, by: FakeStream, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        reads, writes = list(reads), list(writes)
        super().access(by, reads, writes)
        began = max(self.now, self._busy_until.get(by, 0.0))
        self._busy_until[by] = began + self._seconds(by, reads, writes)

    def _seconds(self, by: FakeStream, reads: list[Tensor], writes: list[Tensor]) -> float:
        (written,) = writes
        if by is not self.computing:
            return written.nbytes / (DOWN if device_of(written) == HOST else UP)
        if not reads:
            return 0.0
        loading = 0.0 if written.dtype in self._loaded else FIRST_CALL_SECONDS
        self._loaded.add(written.dtype)
        return loading + 2 * written.shape[0] ** 3 / FLOPS[written.dtype]

    def wait(self) -> None:
        self.now = max(self.now, *self._busy_until.values())


class TimedAccelerator(FakeAccelerator):
    def __init__(self) -> None:
        super().__init__("cuda")
        self.timed = self.order = TimedOrder()
        self.streams = self.fake_streams = FakeStreams(self.order)

    def synchronise(self) -> None:
        super().synchronise()
        self.timed.wait()


def test_a_device_is_measured_as_fast_as_it_is_in_less_than_half_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "PRODUCT_SIZE", 64)
    accelerator = TimedAccelerator()
    with accelerator.at_work():
        rates = door.measured_rates(accelerator, lambda: accelerator.timed.now)
    assert rates == DeviceRates(pytest.approx(DOWN), pytest.approx(1e9), pytest.approx(8e9))
    assert accelerator.timed.now < 2 * FIRST_CALL_SECONDS + 0.5
    assert rates is not None
    balance = (rates.balance.float32, rates.balance.bfloat16)
    assert balance == pytest.approx((1 / 3, 8 / 3))


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, torch.OutOfMemoryError])
def test_a_device_that_cannot_be_measured_has_unknown_rates(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int) -> Tensor:
        raise error("no pinned memory")

    accelerator = TimedAccelerator()
    monkeypatch.setattr(accelerator.streams, "pinned", refuse)
    with accelerator.at_work():
        assert door.measured_rates(accelerator) is None


def test_what_computes_in_the_hosts_memory_is_not_measured() -> None:
    assert door.measured_rates(door.processor()) is None
    assert door.measured_rates(FakeAccelerator("mps")) is None
