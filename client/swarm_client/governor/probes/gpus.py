"""NVIDIA GPUs, read through NVML; the only use of nvidia-ml-py. Nothing without a driver.

NVML numbers GPUs by bus position. CUDA does so only under CUDA_DEVICE_ORDER=PCI_BUS_ID, and
CUDA_VISIBLE_DEVICES hides and renumbers them, so `cuda:0` is resolved through both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pynvml

from swarm_client.governor.probes.readings import GpuReading


class NvmlGpus:
    """Starts NVML at the first reading; without a driver that is the only attempt."""

    def __init__(self, nvml: Any = pynvml, environment: Mapping[str, str] | None = None) -> None:
        self._nvml = nvml
        self._visible = (os.environ if environment is None else environment).get(
            "CUDA_VISIBLE_DEVICES"
        )
        self._handles: list[Any] | None = None

    def read(self) -> tuple[GpuReading, ...]:
        """Readings in CUDA's order, as far as that is known."""
        if self._handles is None:
            self._handles = self._start()
        return tuple(self._read(index, handle) for index, handle in enumerate(self._handles))

    def _start(self) -> list[Any]:
        try:
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except self._nvml.NVMLError:
            return []
        if self._visible is None:
            return handles
        shown: list[Any] = []
        for word in filter(None, (word.strip() for word in self._visible.split(","))):
            handle = self._named(word, handles)
            if handle is None:
                break  # like CUDA, which ignores everything after the first missing one
            shown.append(handle)
        return shown

    def _named(self, word: str, handles: list[Any]) -> Any | None:
        if word.isdecimal():
            return handles[int(word)] if int(word) < len(handles) else None
        uuids = ((self._ask(self._nvml.nvmlDeviceGetUUID, handle), handle) for handle in handles)
        return next((handle for uuid, handle in uuids if uuid and uuid.startswith(word)), None)

    def _read(self, index: int, handle: Any) -> GpuReading:
        nvml = self._nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        temperature = self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        limit = self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        return GpuReading(
            index=index,
            temperature_celsius=None if temperature is None else float(temperature),
            utilization=None if rates is None else rates.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            power_limit_watts=None if limit is None else limit / 1000,
        )

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any | None:
        """Return the answer of the driver; None for what this GPU does not report."""
        try:
            return question(*arguments)
        except self._nvml.NVMLError:
            return None
