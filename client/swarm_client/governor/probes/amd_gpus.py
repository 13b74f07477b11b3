"""AMD GPUs, read through AMD SMI; the only use of amdsmi, which is part of ROCm and no dependency.
Nothing where it is not installed.

AMD SMI numbers GPUs as ROCm does; ROCR_VISIBLE_DEVICES, then HIP_VISIBLE_DEVICES (or
CUDA_VISIBLE_DEVICES in its place) hide and renumber them for a program. A limit of power is not
read: its unit depends on the release.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Callable, Mapping
from typing import Any

from swarm_client.governor.probes.readings import GpuReading

VISIBLE = (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"))
"""Variables by which devices are chosen, one choice after the other; of each the first one set."""

MEGABYTE = 2**20
NOT_KNOWN = "N/A"


class AmdSmiGpus:
    """Starts AMD SMI at the first reading; without it that is the only attempt."""

    def __init__(
        self, load: Callable[[], Any | None] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._load = load or _installed
        self._environment = os.environ if environment is None else environment
        self._smi: Any = None
        self._handles: list[Any] | None = None

    def read(self) -> tuple[GpuReading, ...]:
        """Readings in the order in which torch for ROCm numbers the devices."""
        if self._handles is None:
            self._handles = self._start()
        return tuple(self._read(index, handle) for index, handle in enumerate(self._handles))

    def _start(self) -> list[Any]:
        self._smi = self._load()
        if self._smi is None:
            return []
        try:
            self._smi.amdsmi_init()
            handles = list(self._smi.amdsmi_get_processor_handles())
        except self._smi.AmdSmiLibraryException:
            return []
        for names in VISIBLE:
            chosen = next(
                (self._environment[name] for name in names if name in self._environment), None
            )
            if chosen is not None:
                handles = _chosen(handles, chosen)
        return handles

    def _read(self, index: int, handle: Any) -> GpuReading:
        smi = self._smi
        memory = self._ask(smi.amdsmi_get_gpu_vram_usage, handle)
        activity = self._ask(smi.amdsmi_get_gpu_activity, handle)
        busy: Any = NOT_KNOWN if activity is None else activity["gfx_activity"]
        kinds = smi.AmdSmiTemperatureType
        degrees = self._degrees(handle, kinds.EDGE)
        if degrees is None:  # some have no sensor at the edge
            degrees = self._degrees(handle, kinds.HOTSPOT)
        return GpuReading(
            index=index,
            temperature_celsius=degrees,
            utilization=None if busy == NOT_KNOWN else busy / 100,
            memory_used_bytes=None if memory is None else memory["vram_used"] * MEGABYTE,
        )

    def _degrees(self, handle: Any, kind: Any) -> float | None:
        current = self._smi.AmdSmiTemperatureMetric.CURRENT
        degrees = self._ask(self._smi.amdsmi_get_temp_metric, handle, kind, current)
        return None if degrees is None else float(degrees)

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any | None:
        """Return the answer of the driver; None for what this GPU does not report."""
        try:
            return question(*arguments)
        except self._smi.AmdSmiLibraryException:
            return None


def _chosen(handles: list[Any], text: str) -> list[Any]:
    """The devices of a list of numbers; like ROCm, nothing after the first one that is missing."""
    chosen: list[Any] = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        if not word.isdecimal() or int(word) >= len(handles):
            break
        chosen.append(handles[int(word)])
    return chosen


def _installed() -> Any | None:
    """The module, if it and its library are there. It prints what it misses, and fails otherwise
    than by an ImportError."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module("amdsmi")
    except (ImportError, KeyError, OSError):
        return None
