"""Description of the machine for result files."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def describe_machine(packages: Sequence[str]) -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except ImportError:  # PackageNotFoundError: hivemind is optional
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
