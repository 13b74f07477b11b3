"""Copies of tensors between host memory and the compute device. The identity on a CPU.

On a device with streams every copy passes through pinned memory, which the copy engines read and
write directly, and runs on a stream of its own: one per direction, because each direction has its
own engine. Queued kernels continue meanwhile. Each direction has two permanent buffers, so that one
can be filled while the other is being copied. Without streams a copy is awaited. Values never
change.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

import torch
from torch import Tensor

from swarm_client.stage.worker.accelerator import Accelerator, Event, Streams

BUFFERS = 2


class DeviceCopier(Protocol):
    """Copies tensors between host memory and one device."""

    def to_device(self, host: Tensor) -> Tensor:
        """Copy to the device; `host` may be changed as soon as this returns."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy to host memory, completely; valid until the next call but one."""


def device_copier(accelerator: Accelerator, largest_bytes: int) -> DeviceCopier:
    """The copier of a device. Tensors above `largest_bytes` are copied without pinned memory."""
    if accelerator.streams is None:
        return WaitingCopier(accelerator.device)
    return StreamCopier(accelerator.device, accelerator.streams, largest_bytes)


class WaitingCopier:
    """The copier of a device without streams: each copy is complete when it returns. torch copies
    nothing on the CPU, where host and device are the same memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_device(self, host: Tensor) -> Tensor:
        return host.to(self._device)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.detach().cpu()


@dataclass(slots=True, eq=False)
class _Pinned:
    """A pinned buffer, and the event of the device's last use of it."""

    bytes: Tensor
    done: Event

    def like(self, tensor: Tensor) -> Tensor:
        """Return a view of the buffer with the type and the shape of a tensor."""
        return self.bytes[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class StreamCopier:
    """The copier of a device with streams. A copy waits only for the data and the buffer that it
    needs."""

    def __init__(self, device: torch.device, streams: Streams, largest_bytes: int) -> None:
        self._device = device
        self._streams = streams
        self._largest_bytes = largest_bytes
        self._up, self._down = streams.stream(), streams.stream()
        self._up_buffers, self._down_buffers = (
            cycle([_Pinned(streams.pinned(largest_bytes), streams.event()) for _ in range(BUFFERS)])
            for _ in range(2)
        )

    def to_device(self, host: Tensor) -> Tensor:
        if host.nbytes > self._largest_bytes:
            return host.to(self._device)
        buffer = next(self._up_buffers)
        buffer.done.synchronize()
        staged = buffer.like(host)
        staged.copy_(host)
        computing = self._streams.computing()
        with self._streams.using(self._up):
            tensor = staged.to(self._device, non_blocking=True)
            buffer.done.record()
        computing.wait_event(buffer.done)
        # Created on one stream and used on another: keeps its memory until both are done.
        self._streams.used_by(tensor, computing)
        return tensor

    def to_host(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.nbytes > self._largest_bytes:
            return tensor.cpu()
        buffer = next(self._down_buffers)
        staged = buffer.like(tensor)
        self._down.wait_stream(self._streams.computing())
        with self._streams.using(self._down):
            staged.copy_(tensor, non_blocking=True)
            buffer.done.record()
        self._streams.used_by(tensor, self._down)
        buffer.done.synchronize()
        return staged
