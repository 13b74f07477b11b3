"""The processor of a machine whose free memory a test decides, rather than what else runs on it."""

from __future__ import annotations

import torch

from swarm_client.stage.worker.accelerator import Accelerator, DeviceMemory

TOTAL_BYTES = 2**40


class SharedMachine(Accelerator):
    """Computes as the processor does; counts how often memory was given back."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.free_bytes = TOTAL_BYTES
        self.releases = 0

    def release_cached(self) -> None:
        self.releases += 1

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.free_bytes, TOTAL_BYTES)
