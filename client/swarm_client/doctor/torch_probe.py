"""Runs in a child process: imports torch and prints its findings as one line of JSON.

    python -m swarm_client.doctor.torch_probe

Never imported by the daemon or by `doctor` itself: importing torch costs seconds and hundreds of
megabytes, and a broken driver can take the process down with it.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_DRIVER_SECONDS = 5.0


def look() -> dict[str, Any]:
    """Versions, and one entry per accelerator. `error` replaces the results of a failed step."""
    try:
        import torch

        from swarm_client.stage.worker import accelerator
    except Exception as error:  # noqa: BLE001  (a damaged installation raises anything)
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "built_for": accelerator.built_for(),
        "driver": _driver_version(),
        "nvidia_hardware": _has_nvidia_hardware(),
        "devices": [],
    }
    try:
        accelerator.describe(accelerator.processor())
        found["devices"] = [asdict(one) for one in accelerator.describe_all()]
    except Exception as error:  # noqa: BLE001  (drivers fail in many ways, all reported alike)
        found["device_error"] = f"{type(error).__name__}: {error}"[:300]
    return found


def _driver_version() -> str | None:
    """Version of NVIDIA's kernel driver; None when there is none."""
    try:
        found = re.search(r"\b(\d{3,4}\.\d+(?:\.\d+)?)\b", _DRIVER_FILE.read_text())
        return found[1] if found else None
    except OSError:
        pass
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=_DRIVER_SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def _has_nvidia_hardware() -> bool:
    """Whether a display or compute device of NVIDIA's is on the bus, with or without a driver."""
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text(), (device / "class").read_text()
        except OSError:
            continue
        if vendor.strip() == "0x10de" and kind.startswith("0x03"):
            return True
    # WSL shows its GPU as this device and not on the bus.
    return Path("/dev/dxg").exists() and Path("/usr/lib/wsl/lib/libcuda.so.1").exists()


if __name__ == "__main__":
    print(json.dumps(look()), flush=True)
