"""Tensors of a device, copied to the host one at a time into the same memory.

New memory for each copy of a large matrix is cleared page by page by the system first, which takes
longer than the copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopies:
    """Copies of some tensors of one dtype. Where all are in host memory, nothing is allocated."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        there = [one for one in tensors if one.device.type != "cpu"]
        dtype = there[0].dtype if there else torch.float32
        self._memory = torch.empty(max((one.numel() for one in there), default=0), dtype=dtype)

    def of(self, tensor: Tensor) -> Tensor:
        """Return a tensor in host memory: itself, or a copy that is valid until the next call."""
        if tensor.device.type == "cpu":
            return tensor
        copy = self._memory[: tensor.numel()].view(tensor.shape)
        return copy.copy_(tensor)
