"""The door to devices: what differs between a processor and the kinds of accelerators.

Nothing else in the product asks torch for a kind of device. Tensors are made and computed the same
way on all of them; what is here is the memory of a device, its streams, its waits, its rates, and
its name. `torch.accelerator` answers for all kinds where it can, and the module of the kind
(`torch.get_device_module`) where it cannot; Apple's is the only one with answers of its own.

    kind  device                            memory        copies
    cpu   the processor                     the host's    none
    cuda  NVIDIA; AMD, with torch for ROCm  its own       through pinned memory, on streams
    xpu   Intel                             its own       through pinned memory, on streams
    mps   Apple                             the host's    each one is awaited

No float64 is made on any device: Apple's have none, nor do some of Intel's. The worker keeps counts
in int32 there, and sums of squares are taken on the host.

    python -m swarm_client.stage.worker.accelerator

prints what torch finds on this machine, as JSON (`found`).
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from swarm_client.machine.device_names import CUDA, MPS, PROCESSOR, XPU
from swarm_client.machine.devices import DeviceRates
from swarm_shared.host.memory import host_memory
from swarm_shared.model.repeatable_kernels import repeat_to_the_bit

T = TypeVar("T")

_OUT_OF_MEMORY = (
    "can't allocate memory",  # c10/core/impl/alloc_cpu.cpp
    "MPS backend out of memory",  # aten/src/ATen/mps/MPSAllocator.mm
)

LEFT_FREE_BYTES, LEFT_FREE_PART = 2**30, 8
"""Bytes of the host's memory that no graph takes, for programs that need some suddenly; on small
machines a part of all of it."""

CHECK_SIZE = 8
"""Rows and columns of the product by which a device proves that torch has kernels for it."""

COPIED_BYTES = 2**24
"""Bytes of one measured copy: about a matrix of a layer."""

PRODUCT_SIZE = 2048
"""Rows and columns of a measured product, as many as tokens of a microbatch in common runs."""

ROUND_SECONDS = 0.02
"""Least duration of a measured round. A figure takes three times as long at most, and its first
call."""


class Event(Protocol):
    """A moment in a stream."""

    def record(self) -> None:
        """Set the moment to now, in the stream that is being used."""

    def synchronize(self) -> None:
        """Have the host wait for the moment, if there is one."""


class Stream(Protocol):
    """Work that a device carries out in order."""

    def wait_event(self, event: Any) -> None:
        """Continue only after the moment."""

    def wait_stream(self, other: Any) -> None:
        """Continue only after what the other stream has to do now."""


class Streams(Protocol):
    """The streams of one device, which run side by side."""

    def stream(self) -> Stream:
        """Return a new stream."""

    def event(self) -> Event:
        """Return a new event, of no moment yet."""

    def computing(self) -> Stream:
        """Return the stream that is being used."""

    def using(self, stream: Any) -> AbstractContextManager[object]:
        """Return a context; what is begun within it belongs to the stream."""

    def used_by(self, tensor: Tensor, stream: Any) -> None:
        """Keep the tensor's memory until the stream has done what it has to do now."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return bytes of host memory that the device reads and writes by itself."""

    def in_background(self, work: Callable[[], T]) -> Future[T]:
        """Start host work in a thread for which this device is selected; one work at a time."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device's memory."""

    free_bytes: int
    total_bytes: int


class Accelerator:
    """The processor, and base of all other kinds."""

    has_own_memory = False
    """Whether the device's memory is not the host's."""
    streams: Streams | None = None
    """The streams of the device; None where a copy waits until all that was begun before it is
    done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def is_processor(self) -> bool:
        return self.device.type == PROCESSOR

    @property
    def label(self) -> str:
        """The device's name for people."""
        return "CPU"

    def details(self) -> str:
        """Return what else tells apart devices of this kind, as part of a sentence; may be
        empty."""
        return ""

    def memory(self) -> DeviceMemory:
        host = host_memory()
        return DeviceMemory(host.available_bytes, host.total_bytes)

    def spare_bytes(self) -> int:
        """Return how much of its free memory may be taken; the rest is for other programs."""
        memory = self.memory()
        return memory.free_bytes - min(LEFT_FREE_BYTES, memory.total_bytes // LEFT_FREE_PART)

    def select(self) -> None:
        """Make it the device of this process, which computes with kernels that repeat."""

    def limit_memory(self, nbytes: int | None) -> None:
        """Have requests beyond so many bytes fail as out of memory; None for no limit."""

    def release_cached(self) -> None:
        """Return memory that is held for later: by torch, and on the host by glibc, whose settings
        keep it in a worker (`swarm_client.stage.handle.warm_worker`)."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def synchronise(self) -> None:
        """Wait for everything that was begun."""


class StreamAccelerator(Accelerator):
    """A device with memory and streams of its own: cuda and xpu."""

    has_own_memory = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.streams = _DeviceStreams(device)

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.device)

    @property
    def label(self) -> str:
        return str(self._module.get_device_name(self.device))

    def details(self) -> str:
        capability = self._module.get_device_capability(self.device)
        if not isinstance(capability, tuple):
            return ""
        return "compute capability {}.{}".format(*capability)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(*torch.accelerator.get_memory_info(self.device))

    def select(self) -> None:
        torch.accelerator.set_device_index(self.device)
        repeat_to_the_bit(self.device)

    def limit_memory(self, nbytes: int | None) -> None:
        share = 1.0 if nbytes is None else min(1.0, nbytes / self.memory().total_bytes)
        self._module.set_per_process_memory_fraction(share, self.device)

    def release_cached(self) -> None:
        torch.accelerator.empty_cache()

    def synchronise(self) -> None:
        torch.accelerator.synchronize(self.device)


class AppleAccelerator(Accelerator):
    """The GPU of an Apple processor, which computes in the host's memory.

    Metal recommends a largest working set, which torch takes as the device's memory.
    """

    @property
    def label(self) -> str:
        return "Apple GPU"

    def memory(self) -> DeviceMemory:
        recommended = int(torch.mps.recommended_max_memory())
        free = min(
            recommended - int(torch.mps.driver_allocated_memory()), super().memory().free_bytes
        )
        return DeviceMemory(max(0, free), recommended)

    def limit_memory(self, nbytes: int | None) -> None:
        total = self.memory().total_bytes
        share = 1.0 if nbytes is None else min(1.0, nbytes / total)
        torch.mps.set_per_process_memory_fraction(share)

    def release_cached(self) -> None:
        torch.mps.empty_cache()
        super().release_cached()

    def synchronise(self) -> None:
        torch.mps.synchronize()


class _DeviceStreams:
    """torch's streams of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The selected device is a property of the thread.
        self._background = ThreadPoolExecutor(
            1, "background", initializer=torch.accelerator.set_device_index, initargs=(device,)
        )

    def stream(self) -> torch.Stream:
        return torch.Stream(self._device)

    def event(self) -> torch.Event:
        return torch.Event(self._device)

    def computing(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)

    def using(self, stream: torch.Stream) -> AbstractContextManager[object]:
        return stream

    def used_by(self, tensor: Tensor, stream: torch.Stream) -> None:
        tensor.record_stream(stream)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def in_background(self, work: Callable[[], T]) -> Future[T]:
        return self._background.submit(work)


_KINDS: dict[str, type[Accelerator]] = {
    PROCESSOR: Accelerator,
    CUDA: StreamAccelerator,
    XPU: StreamAccelerator,
    MPS: AppleAccelerator,
}


def processor() -> Accelerator:
    """Return the processor, which every machine has."""
    return Accelerator(torch.device(PROCESSOR))


def accelerators() -> list[Accelerator]:
    """Return the accelerators that torch sees on this machine. All are of one kind, for which torch
    is built."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type not in _KINDS:
        return []
    make = _KINDS[kind.type]
    return [make(torch.device(kind.type, i)) for i in range(torch.accelerator.device_count())]


def accelerator_named(name: str) -> Accelerator | None:
    """Return a device of this machine by its name; None if torch sees no such device."""
    device = torch.device(name)
    if device.type == PROCESSOR:
        return processor()
    number = device.index or 0
    for accelerator in accelerators():
        if (accelerator.device.type, accelerator.device.index) == (device.type, number):
            return accelerator
    return None


def release_cached() -> None:
    """Return memory that is held for later, on the host and on every device."""
    for accelerator in (processor(), *accelerators()):
        accelerator.release_cached()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed, on any kind of device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(text in str(error) for text in _OUT_OF_MEMORY)


def built_for() -> str:
    """Return the kind of accelerator that this torch is built for, for people."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    kind = torch.accelerator.current_accelerator()
    return {MPS: "Metal", XPU: "Intel GPUs"}.get(kind.type if kind else "", "CPU only")


@dataclass(frozen=True, slots=True)
class FoundAccelerator:
    """An accelerator that has computed something, as other processes read of it."""

    name: str
    """The device's name in torch's spelling."""
    label: str
    details: str
    free_bytes: int
    total_bytes: int
    has_own_memory: bool
    rates: DeviceRates | None


def describe_all() -> list[FoundAccelerator]:
    """Return this machine's accelerators. An error of torch's where one cannot compute: only a
    kernel that runs proves that this build has code for the device."""
    return [describe(one) for one in accelerators()]


def describe(accelerator: Accelerator) -> FoundAccelerator:
    """Compute something on a device, and return what is known of it."""
    ones = torch.ones(CHECK_SIZE, CHECK_SIZE, device=accelerator.device)
    ones.matmul(ones).sum().item()
    memory = accelerator.memory()
    return FoundAccelerator(
        str(accelerator.device), accelerator.label, accelerator.details(), memory.free_bytes,
        memory.total_bytes, accelerator.has_own_memory, measured_rates(accelerator),
    )  # fmt: skip


def measured_rates(
    accelerator: Accelerator, clock: Callable[[], float] = time.perf_counter
) -> DeviceRates | None:
    """Measure how fast a device copies and multiplies. None for a device that copies nothing beside
    its computations, or where that fails."""
    streams = accelerator.streams
    if streams is None:
        return None
    try:
        return DeviceRates(
            COPIED_BYTES / _seconds(_copies_both_ways(accelerator, streams), accelerator, clock),
            *(
                2 * PRODUCT_SIZE**3 / _seconds(_product(accelerator, dtype), accelerator, clock)
                for dtype in (torch.float32, torch.bfloat16)
            ),
        )
    except (RuntimeError, MemoryError):  # what torch raises where a device cannot
        return None


def _copies_both_ways(accelerator: Accelerator, streams: Streams) -> Callable[[], None]:
    """Return what begins a copy of `COPIED_BYTES` in each direction."""
    host = [streams.pinned(COPIED_BYTES) for _ in range(2)]
    on_device = [
        torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=accelerator.device) for _ in range(2)
    ]
    up, down = streams.stream(), streams.stream()
    accelerator.synchronise()

    def copy() -> None:
        with streams.using(up):
            on_device[0].copy_(host[0], non_blocking=True)
        with streams.using(down):
            host[1].copy_(on_device[1], non_blocking=True)

    return copy


def _product(accelerator: Accelerator, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return what begins a product of two matrices."""
    ones = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, dtype=dtype, device=accelerator.device)
    return lambda: ones @ ones


def _seconds(
    begin: Callable[[], object], accelerator: Accelerator, clock: Callable[[], float]
) -> float:
    """Return the seconds that a device takes for what a call begins, the first call apart, in which
    kernels are loaded."""
    begin()
    accelerator.synchronise()
    calls = 1
    while True:
        began = clock()
        for _ in range(calls):
            begin()
        accelerator.synchronise()
        duration = clock() - began
        if duration >= ROUND_SECONDS:
            return duration / calls
        calls *= 2


if __name__ == "__main__":
    print(json.dumps([asdict(one) for one in describe_all()]), flush=True)
