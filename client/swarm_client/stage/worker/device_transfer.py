"""Copies of tensors between host memory and the compute device. The identity on a CPU.

On a GPU every copy passes through pinned memory, which the copy engines read and write directly,
and runs on a stream of its own: one per direction, because each direction has its own engine.
Queued kernels continue meanwhile. Each direction has two permanent buffers, so that one can be
filled while the other is being copied. Values never change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import cycle
from typing import Protocol

import torch
from torch import Tensor

BUFFERS = 2


class DeviceCopier(Protocol):
    def to_device(self, host: Tensor) -> Tensor:
        """Copy to the device; `host` may be changed as soon as this returns."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy to host memory, completely; valid until the next call but one."""


def device_copier(device: torch.device, largest_bytes: int) -> DeviceCopier:
    """The copier of a device. Tensors above `largest_bytes` are copied without pinned memory."""
    if device.type == "cuda":
        return CudaCopier(device, largest_bytes)
    return NoCopier()


class NoCopier:
    """The copier of the CPU: host and device are the same memory."""

    def to_device(self, host: Tensor) -> Tensor:
        return host

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.detach()


@dataclass(slots=True, eq=False)
class _Pinned:
    """A pinned buffer, and the event of the device's last use of it."""

    bytes: Tensor
    done: torch.cuda.Event = field(default_factory=torch.cuda.Event)

    def like(self, tensor: Tensor) -> Tensor:
        return self.bytes[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class CudaCopier:
    """The copier of a GPU. A copy waits only for the data and the buffer that it needs."""

    def __init__(self, device: torch.device, largest_bytes: int) -> None:
        self._device = device
        self._largest_bytes = largest_bytes
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up_buffers, self._down_buffers = (
            cycle([_Pinned(self._pinned(largest_bytes)) for _ in range(BUFFERS)]) for _ in range(2)
        )

    @staticmethod
    def _pinned(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def to_device(self, host: Tensor) -> Tensor:
        if host.nbytes > self._largest_bytes:
            return host.to(self._device)
        buffer = next(self._up_buffers)
        buffer.done.synchronize()
        staged = buffer.like(host)
        staged.copy_(host)
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._up):
            tensor = staged.to(self._device, non_blocking=True)
            buffer.done.record()
        computing.wait_event(buffer.done)
        # Created on one stream and used on another: keeps its memory until both are done.
        tensor.record_stream(computing)
        return tensor

    def to_host(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.nbytes > self._largest_bytes:
            return tensor.to("cpu")
        buffer = next(self._down_buffers)
        staged = buffer.like(tensor)
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            staged.copy_(tensor, non_blocking=True)
            buffer.done.record()
        tensor.record_stream(self._down)
        buffer.done.synchronize()
        return staged
