"""Graphs of layers that wait for their backward pass in host memory.

What autograd saves of a layer is copied to pinned host memory when its forward pass is handed to
the device, while later layers compute, and comes back before its backward pass: when that of the
layer behind it begins. Two layers' graphs are on the device at a time, one that is used and one
that is copied. (KARMA, Wahib et al. 2020, arXiv 2008.11421, section 3, does as much with whole
blocks.) Which layers these are is decided by `swarm_client.stage.worker.graph_memory`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from swarm_client.stage.worker.accelerator import Accelerator, Streams

ALIGNMENT_BYTES = 512
"""Every tensor begins at a multiple of this many bytes, as in torch's own allocator: libraries may
choose other kernels, whose sums have another order, for data that is aligned to less."""


@dataclass(slots=True)
class _Place:
    """The place of a saved tensor in the memory of its layer. Autograd holds it instead of the
    tensor."""

    layer: _Layer
    start: int
    nbytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """Return the tensor on the device."""
        storage = self.layer.on_device()[self.start : self.start + self.nbytes].view(self.dtype)
        # An offset is counted from the beginning of the layer's memory.
        first = storage.storage_offset() + self.offset
        return storage.as_strided(self.size, self.stride, first)


class _Layer:
    """The graph of one layer, in host memory or on its way."""

    def __init__(self, offload: GraphOffload, before: _Layer | None) -> None:
        self._offload = offload
        self.before = before
        """The offloaded layer whose backward pass follows this one's."""
        self._storages: dict[int, tuple[int, Tensor]] = {}
        """The saved storages by address, until the layer leaves the device: the place where the
        copy begins, in bytes, and one tensor of the storage."""
        self._nbytes = 0
        self._host: Tensor | None = None
        self._device: Tensor | None = None
        self.copied_to_host = offload.streams.event()
        """The end of the copy to the host."""
        self._back = offload.streams.event()

    def save(self, tensor: Tensor) -> _Place:
        """Keep a tensor until `send`; return its place."""
        tensor = tensor.detach()
        storage = tensor.untyped_storage()
        start, _ = self._storages.setdefault(storage.data_ptr(), (self._nbytes, tensor))
        if start == self._nbytes:
            self._nbytes += -(-storage.nbytes() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return _Place(
            self, start, storage.nbytes(), tensor.dtype, tensor.size(), tensor.stride(),
            int(tensor.storage_offset()),
        )  # fmt: skip

    def send(self) -> None:
        """Begin the copy to the host, behind what has been handed to the device."""
        streams, down = self._offload.streams, self._offload.down
        self._host = streams.pinned(self._nbytes)
        down.wait_stream(streams.computing())
        with streams.using(down):
            for start, tensor in self._storages.values():
                whole = _bytes_of(tensor)
                self._host[start : start + whole.numel()].copy_(whole, non_blocking=True)
            self.copied_to_host.record()
        for _, tensor in self._storages.values():
            streams.used_by(tensor, down)
        self._storages.clear()

    def fetch(self) -> None:
        """Begin the copy back, unless it has begun."""
        if self._device is not None or self._host is None:
            return
        streams, up = self._offload.streams, self._offload.up
        self._device = self._offload.nothing.new_empty(self._nbytes)
        # The memory may belong to what the device is still computing.
        up.wait_stream(streams.computing())
        up.wait_event(self.copied_to_host)
        with streams.using(up):
            self._device.copy_(self._host, non_blocking=True)
            self._back.record()
        streams.used_by(self._device, up)

    def on_device(self) -> Tensor:
        """Return the layer's memory on the device, for what is handed to it now."""
        self.fetch()
        assert self._device is not None, "a layer's backward pass follows its forward pass"
        self._offload.streams.computing().wait_event(self._back)
        if self.before is not None:
            self.before.fetch()
        return self._device


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor, as bytes."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((elements,), (1,), 0).view(torch.uint8)


class GraphOffload:
    """The graphs of one stage on one device."""

    def __init__(self, device: torch.device, streams: Streams, permanent: Iterable[Tensor]) -> None:
        self.nothing = torch.empty(0, dtype=torch.uint8, device=device)
        """An empty tensor on the device, from which memory of the device is made."""
        self.streams = streams
        self.down, self.up = streams.stream(), streams.stream()
        self._permanent = {tensor.untyped_storage().data_ptr() for tensor in permanent}

    def forward_pass(self, layers: int) -> OffloadedPass:
        """Return the offload of one forward pass, of so many layers."""
        return OffloadedPass(self, layers)

    def stays(self, tensor: Tensor) -> bool:
        """Whether a saved tensor takes no memory of the device for this graph: parameters and
        tables are there anyway, and of random numbers CUDA's attention saves the seed on the host,
        although it draws none."""
        is_permanent = tensor.untyped_storage().data_ptr() in self._permanent
        return is_permanent or not tensor.numel() or tensor.device != self.nothing.device

    def copy_seconds(self, accelerator: Accelerator, nbytes: int) -> float:
        """Measure a copy of so many bytes to the host and back; the slower of both."""
        seconds: list[float] = []
        on_device, on_host = self.nothing.new_empty(nbytes), self.streams.pinned(nbytes)
        for source, target in ((on_device, on_host), (on_host, on_device)):
            accelerator.synchronise()
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            accelerator.synchronise()
            seconds.append(time.perf_counter() - began)
        return max(seconds)


class OffloadedPass:
    """The layers of one forward pass that go to host memory (`swarm_shared.model.llama`)."""

    def __init__(self, offload: GraphOffload, layers: int) -> None:
        self._offload = offload
        self.layers = layers
        self._last: _Layer | None = None

    @contextmanager
    def layer(self) -> Iterator[None]:
        """Offload the graph of the layer that is computed within."""
        layer = _Layer(self._offload, self._last)
        if self._last is not None and self._last.before is not None:
            # The host runs ahead of the device, and would make graphs faster than they leave.
            self._last.before.copied_to_host.synchronize()

        # The hooks live as long as the graph: they must not hold the layers behind this one.
        stays = self._offload.stays

        def pack(tensor: Tensor) -> Tensor | _Place:
            return tensor if stays(tensor) else layer.save(tensor)

        def unpack(saved: Tensor | _Place) -> Tensor:
            return saved.tensor() if isinstance(saved, _Place) else saved

        with saved_tensors_hooks(pack, unpack):
            yield
        layer.send()
        self._last = layer

    def followed_by(self, output_BTD: Tensor) -> None:
        """Begin to copy the last layer back when the gradient of this output is there."""
        if self._last is None:
            return
        # The graph lives longer than what the layer has saved.
        last = weakref.ref(self._last)

        def fetch(_: Tensor) -> None:
            layer = last()
            if layer is not None:
                layer.fetch()

        output_BTD.register_hook(fetch)  # type: ignore[no-untyped-call]
