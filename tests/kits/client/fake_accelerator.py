"""Accelerators over the processor, which refuse what real ones refuse.

A tensor is the processor's own, and a label on its storage says on which device it counts as lying.
Two modes of torch see every call: one for functions (where a tensor is made, copied, asked for its
device), one for operators, also those of a backward pass. Refused are

- operators on tensors of two devices, but for scalars of the host, and copies;
- float64 on the device, as Apple's and some of Intel's have none;
- numpy of a device's tensor, and pinned memory where there is none;
- operators for which torch's own list names no kernel of the kind (`native_functions.yaml`; it has
  none of Intel's, which are listed elsewhere);
- what reads or overwrites memory without waiting for what another stream, or the host, does with it
  (`Order`).

What is computed is what the processor computes, to the bit. Not imitated are autocast, which needs
the real device, and that memory returns to the allocator too early (`Streams.used_by`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torchgen
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from swarm_client.stage.worker.accelerator import Accelerator, DeviceMemory

HOST = torch.device("cpu")
KINDS = ("cuda", "mps", "xpu")
UNLISTED_KINDS = ("xpu",)

STANDING_IN = re.compile(r"aten::_scaled_dot_product_flash_attention_for_cpu(_backward)?")
"""Kernels that the processor chooses where a device would choose its own."""

COPIES = {"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_"}
SCALARS = {"aten::_local_scalar_dense", "aten::equal"}
"""Operators whose answer the host waits for."""

Clock = dict[object, int]
T = TypeVar("T")


def device_of(tensor: Tensor) -> torch.device:
    """The device on which a tensor counts as lying."""
    found: torch.device = getattr(_notes(tensor), "fake_device", HOST)
    return found


def _notes(tensor: Tensor) -> Any:
    """The storage, which is where labels are written: torch keeps its Python object as long as the
    memory."""
    return tensor.untyped_storage()


class Order:
    """What may run at the same time: the host and the streams of a device (Lamport 1978).

    A clock holds, of the host and of each stream, how much of its work is known to be done.
    """

    def __init__(self) -> None:
        self.host = FakeStream("host")
        self.computing = FakeStream("computing")

    def access(self, by: FakeStream, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """`by` does one piece of work. RuntimeError if it may be too early."""
        by.learn(self.host.clock)
        by.clock[by] = by.clock.get(by, 0) + 1
        for tensor in reads:
            storage = _notes(tensor)
            self._check(by, getattr(storage, "fake_write", ()), "reads what is being written")
            storage.fake_reads = (*getattr(storage, "fake_reads", ()), self._now(by))
        for tensor in writes:
            storage = _notes(tensor)
            self._check(by, getattr(storage, "fake_write", ()), "overwrites what is being written")
            self._check(by, getattr(storage, "fake_reads", ()), "overwrites what is being read")
            storage.fake_write, storage.fake_reads = (self._now(by),), ()

    @staticmethod
    def _now(by: FakeStream) -> tuple[FakeStream, int]:
        return by, by.clock[by]

    @staticmethod
    def _check(by: FakeStream, earlier: Iterable[tuple[FakeStream, int]], what: str) -> None:
        for other, moment in earlier:
            if other is not by and by.clock.get(other, 0) < moment:
                raise RuntimeError(f"{by.name} {what} by {other.name}, without waiting for it")


class TimedOrder(Order):
    """Streams whose copies and products take time, as a path through all that was awaited."""

    def __init__(
        self, up_bytes_per_second: float, down_bytes_per_second: float,
        flops_per_second: Mapping[torch.dtype, float],
    ) -> None:  # fmt: skip
        super().__init__()
        self._up, self._down = up_bytes_per_second, down_bytes_per_second
        self._flops = flops_per_second
        self._ends: dict[tuple[object, int], float] = {}

    def now(self) -> float:
        """Return the end of all that the host has awaited."""
        return self._end_of(self.host.clock)

    def access(self, by: FakeStream, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        reads, writes = list(reads), list(writes)
        before = by.clock.get(by, 0)
        super().access(by, reads, writes)
        began = max(self._end_of(by.clock), self._ends.get((by, before), 0.0))
        seconds = sum(self.seconds(reads, one) for one in writes if by is not self.host)
        self._ends[self._now(by)] = began + seconds

    def _end_of(self, clock: Clock) -> float:
        return max((self._ends.get(moment, 0.0) for moment in clock.items()), default=0.0)

    def seconds(self, reads: Sequence[Tensor], written: Tensor) -> float:
        """Return the time of a copy between memories, or of a product; of all else, none."""
        if reads and device_of(reads[0]) != device_of(written):
            return written.nbytes / (self._down if device_of(written) == HOST else self._up)
        if len(reads) == 2 and all(one.ndim == 2 for one in (*reads, written)):
            (rows, inner), (also_inner, columns) = (tuple(one.shape) for one in reads)
            if inner == also_inner and written.shape == (rows, columns):
                return 2 * rows * inner * columns / self._flops[written.dtype]
        return 0.0


class FakeStream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {}

    def learn(self, clock: Clock) -> None:
        """Continue only after what a clock knows to be done."""
        for one, moment in clock.items():
            self.clock[one] = max(moment, self.clock.get(one, 0))

    def wait_stream(self, other: FakeStream) -> None:
        self.learn(other.clock)

    def wait_event(self, event: FakeEvent) -> None:
        self.learn(event.moment)


class FakeEvent:
    def __init__(self, streams: FakeStreams) -> None:
        self._streams = streams
        self.moment: Clock = {}

    def record(self) -> None:
        self.moment = dict(self._streams.current.clock)

    def synchronize(self) -> None:
        self._streams.order.host.learn(self.moment)


class DeferredWork(Future[T]):
    """Background work that is done as late as possible: when its result is awaited."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__()
        self._work = work

    def result(self, timeout: float | None = None) -> T:
        if not self.done():
            self.set_result(self._work())
        return super().result(timeout)


class FakeStreams:
    def __init__(self, order: Order) -> None:
        self.order = order
        self.current = order.computing
        self.all = [order.computing]

    def stream(self) -> FakeStream:
        self.all.append(FakeStream(f"stream {len(self.all)}"))
        return self.all[-1]

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def computing(self) -> FakeStream:
        return self.current

    @contextmanager
    def using(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def used_by(self, tensor: Tensor, stream: FakeStream) -> None:
        if device_of(tensor) == HOST:
            raise RuntimeError("record_stream is for tensors of a device")

    def pinned(self, nbytes: int) -> Tensor:
        # Noted here: what is said to torch in a backward pass passes `_Functions` by.
        pinned = torch.empty(nbytes, dtype=torch.uint8)
        _notes(pinned).fake_pinned = True
        return pinned

    def in_background(self, work: Callable[[], T]) -> Future[T]:
        return DeferredWork(work)


class FakeAccelerator(Accelerator):
    """One of `KINDS`. Tensors are on it within `at_work`, in this thread."""

    def __init__(self, kind: str, order: Order | None = None) -> None:
        super().__init__(torch.device(kind, 0))
        self.limit_bytes: int | None = None
        self.order = order or Order()
        self.kernels = None if kind in UNLISTED_KINDS else kernels_of(kind.upper())
        self.has_own_memory = kind != "mps"
        self.fake_streams = FakeStreams(self.order)
        self.streams = None if kind == "mps" else self.fake_streams
        self.calls: dict[str, int] = {}
        """How often each operator ran on the device."""

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with _Operators(self), _Functions(self):
            yield

    @property
    def label(self) -> str:
        return f"fake {self.device.type}"

    def memory(self) -> DeviceMemory:
        return DeviceMemory(2**33, 2**33)

    def limit_memory(self, nbytes: int | None) -> None:
        self.limit_bytes = nbytes

    def synchronise(self) -> None:
        for stream in self.fake_streams.all:
            self.order.host.learn(stream.clock)

    def place(self, tensor: Tensor) -> Tensor:
        """Have a new tensor lie on the device. TypeError for float64."""
        if tensor.dtype in (torch.float64, torch.complex128):
            raise TypeError(
                f"Cannot convert a {self.device} Tensor to float64 dtype as the framework doesn't "
                "support float64. Please use float32 instead."
            )
        _notes(tensor).fake_device = self.device
        return tensor


@cache
def kernels_of(key: str) -> frozenset[str]:
    """The names of operators that torch lists for a dispatch key, or for all devices."""
    listed = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    found: set[str] = set()
    for entry in listed.read_text().split("\n- func: ")[1:]:
        name = re.split(r"[.(]", entry, maxsplit=1)[0]
        keys = set(re.findall(r"\w+", " ".join(re.findall(r"^    ([\w, ]+):", entry, re.M))))
        is_composite = any(one.startswith("Composite") for one in keys)
        if (
            key in keys
            or is_composite
            or not re.search(r"^  (dispatch|structured_del)", entry, re.M)
        ):
            found.add(f"aten::{name}")
    return frozenset(found)


def _tensors(values: object) -> list[Tensor]:
    """The tensors among the arguments or results of an operator; torch's `tree_flatten` would take
    half of a test's time."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, tuple | list):
        return [one for value in values for one in _tensors(value)]
    return []


@cache
def _arguments(func: Any) -> tuple[tuple[str, bool], ...]:
    """The name of each argument of an operator, and whether the operator writes to it."""
    infos = [(one.name, one.alias_info) for one in func._schema.arguments]
    return tuple((name, info is not None and info.is_write) for name, info in infos)


class _Operators(TorchDispatchMode):
    """Sees every operator, of backward passes too."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._carried_out(func, args, dict(kwargs or {}))

    def _carried_out(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        accelerator, name = self._accelerator, func._schema.name
        given = _tensors((args, *kwargs.values()))
        places = {device_of(one) for one in given if one.ndim or device_of(one) != HOST}
        if name not in COPIES and len(places) > 1:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, "
                f"{' and '.join(sorted(map(str, places)))}! ({name})"
            )
        on_device = accelerator.device in places
        if on_device:
            self._refuse_unknown(name)
            accelerator.calls[name] = accelerator.calls.get(name, 0) + 1
        out = func(*args, **kwargs)
        if name not in COPIES:
            storages = {one.untyped_storage()._cdata for one in given}
            made = [o for o in _tensors(out) if o.untyped_storage()._cdata not in storages]
            if on_device:
                for one in made:
                    accelerator.place(one)
            self._take_place(func, args, kwargs, made, on_device)
        else:
            self._copied(name, args, _tensors(out))
        return out

    def _refuse_unknown(self, name: str) -> None:
        kernels = self._accelerator.kernels
        is_listed = kernels is None or not kernels.isdisjoint((name, name.rstrip("_")))
        if not is_listed and not STANDING_IN.fullmatch(name):
            raise NotImplementedError(
                f"The operator '{name}' is not currently implemented for the "
                f"{self._accelerator.device.type} device."
            )

    def _take_place(
        self, func: Any, args: Any, kwargs: dict[str, Any], made: list[Tensor], on_device: bool
    ) -> None:
        """Note who has read and written what."""
        written, read = list(made), list[Tensor]()
        for number, (argument, is_written) in enumerate(_arguments(func)):
            value = args[number] if number < len(args) else kwargs.get(argument)
            (written if is_written else read).extend(_tensors(value))
        if not written and func._schema.name not in SCALARS:
            return  # a view: nothing is computed
        order, streams = self._accelerator.order, self._accelerator.fake_streams
        order.access(streams.current if on_device else order.host, read, written)
        if on_device and func._schema.name in SCALARS:
            order.host.learn(streams.current.clock)

    def _copied(self, name: str, args: Any, out: list[Tensor]) -> None:
        order, streams = self._accelerator.order, self._accelerator.fake_streams
        if name == "aten::_to_copy":
            sources, targets = [args[0]], out
            if device_of(args[0]) != HOST:
                for one in out:
                    self._accelerator.place(one)
        else:
            targets, sources = _tensors(args[0]), _tensors(args[1])
        across = {device_of(one) for one in (*targets, *sources)}
        by = order.host if across == {HOST} else streams.current
        order.access(by, sources, targets)
        if len(across) > 1 and not (len(args) > 2 and args[2] is True):
            order.host.learn(by.clock)


class _Functions(TorchFunctionMode):
    """Sees what a program says to torch: where tensors are made and copied."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return device_of(args[0])
        if func == torch.Tensor.is_cpu.__get__:  # type: ignore[attr-defined]
            return device_of(args[0]) == HOST
        if func is torch.Tensor.cpu:
            return self._moved(args[0], HOST)
        if func is torch.Tensor.to:
            return self._to(args[0], args[1:], kwargs)
        if func is torch.Tensor.__deepcopy__:
            copied: Tensor = func(*args, **kwargs)
            return self._accelerator.place(copied) if device_of(args[0]) != HOST else copied
        if func is torch.Tensor.numpy:
            return self._numpy(args[0])
        if kwargs.pop("pin_memory", False):
            if self._accelerator.streams is None:
                raise RuntimeError(f"{self._accelerator.device.type} has no pinned memory")
            pinned = func(*args, **kwargs)
            _notes(pinned).fake_pinned = True
            return pinned
        if "device" in kwargs and self._is_own(kwargs["device"]):
            del kwargs["device"]
            made = self._accelerator.place(func(*args, **kwargs))
            self._accelerator.order.access(self._accelerator.fake_streams.current, (), (made,))
            return made
        return func(*args, **kwargs)

    def _is_own(self, device: Any) -> bool:
        if isinstance(device, str):
            device = torch.device(device)
        own = self._accelerator.device
        return isinstance(device, torch.device) and (device.type, device.index or 0) == (
            own.type, own.index,
        )  # fmt: skip

    def _to(self, tensor: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        target = device_of(tensor)
        words = list(rest)
        if words and isinstance(words[0], Tensor):
            target, words[0] = device_of(words[0]), words[0].dtype
        elif words and isinstance(words[0], (torch.device, str)):
            target = self._device(words.pop(0))
        if "device" in kwargs:
            target = self._device(kwargs.pop("device"))
        aside = bool(kwargs.pop("non_blocking", False))
        if target == device_of(tensor):
            return tensor.to(*words, **kwargs)
        dtype = next((word for word in words if isinstance(word, torch.dtype)), None)
        return self._moved(tensor, target, kwargs.get("dtype", dtype), aside=aside)

    def _device(self, device: Any) -> torch.device:
        return self._accelerator.device if self._is_own(device) else torch.device(device)

    def _moved(
        self, tensor: Tensor, target: torch.device, dtype: torch.dtype | None = None, *,
        aside: bool = False,
    ) -> Tensor:  # fmt: skip
        if device_of(tensor) == target:
            return tensor
        order, by = self._accelerator.order, self._accelerator.fake_streams.current
        with _Quietly():
            copy = tensor.clone() if dtype is None else tensor.to(dtype, copy=True)
        if target == HOST:
            if hasattr(_notes(copy), "fake_device"):
                del _notes(copy).fake_device
        else:
            self._accelerator.place(copy)
        order.access(by, (tensor,), (copy,))
        # Memory that is not pinned is copied before the call returns.
        if not (aside and getattr(_notes(tensor), "fake_pinned", False)):
            order.host.learn(by.clock)
        return copy

    def _numpy(self, tensor: Tensor) -> Any:
        if device_of(tensor) != HOST:
            raise TypeError(
                f"can't convert {device_of(tensor)} device type tensor to numpy. Use Tensor.cpu() "
                "to copy the tensor to host memory first."
            )
        self._accelerator.order.access(self._accelerator.order.host, (tensor,), ())
        return tensor.numpy()


def _Quietly() -> AbstractContextManager[object]:  # noqa: N802
    """Operators within are no work of their own."""
    return torch.utils._python_dispatch._disable_current_modes()
