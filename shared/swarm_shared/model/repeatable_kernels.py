"""Kernels whose sums have one order: a microbatch that is computed again gives the same bits.

The processor's have, with the same number of threads. A GPU's backward pass of attention adds what
its blocks find in the order in which they end, unless torch is asked for one order (`torch`'s page
on reproducibility); `docs/benchmarks.md` has what this costs. Apple's and Intel's GPUs have no such
switch in torch.
"""

from __future__ import annotations

import os

import torch

WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACE = ":4096:8"
"""A workspace of its own for each stream: what cuBLAS asks for products that repeat where several
streams are used (https://docs.nvidia.com/cuda/cublas, "Results reproducibility"). 32 MiB."""


def repeat_to_the_bit(device: torch.device) -> None:
    """Have this process choose such kernels on a device of this kind; call it before the first
    product, as cuBLAS reads its setting then."""
    if device.type != "cuda":
        return
    os.environ.setdefault(WORKSPACE_VARIABLE, WORKSPACE)
    # New memory would be filled first. Nothing here reads what was not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
