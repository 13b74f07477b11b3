"""The checks of this machine: Python, torch and its devices, the home folder, the disk, p2pd.

Nothing in the home is created or changed. What may crash or hang (torch and its driver, hivemind)
runs in a child process.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import trio

from swarm_client.averaging.handle.options import AveragingOptions
from swarm_client.averaging.handle.supervisor import AveragingWorker
from swarm_client.doctor.report import Check, Detail, ok, problem, skipped, warning
from swarm_client.machine.devices import Device, DeviceRates, choose_device, listed_accelerator
from swarm_client.machine.home import Home
from swarm_client.stage.handle.self_test import ADVICE, passed_text, run_self_test
from swarm_shared.base.errors import (
    CapacityError,
    ConfigurationError,
    MachineError,
    StorageError,
    SwarmError,
)
from swarm_shared.base.memory import MemoryOffer, StageMemory
from swarm_shared.base.text import count_text, memory_text, rate_text
from swarm_shared.host.cores import usable_cores
from swarm_shared.host.python_modules import module_command
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import StageNeeds
from swarm_shared.scheduling.placement.memory_plan import MemoryPlan, memory_plan

OLDEST_PYTHON = (3, 11)
TORCH_SERIES = "2.13."
"""Version required by pyproject.toml; numbers agree between machines of one series."""
P2PD_SECONDS = 18.0
"""Timeout of p2pd's start."""

COMFORTABLE_DISK_BYTES = 10 * 2**30
"""Free bytes below which a warning is given."""
MIN_DISK_BYTES = 2**30
"""Free bytes below which joining fails: a small model's stage with its optimiser state, written
twice."""

GIB = 2**30

_TORCH_MODULE = "swarm_client.doctor.torch_probe"


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    text = ".".join(map(str, version))
    seen = f"{platform.python_implementation()} {text} on {platform.system()} {platform.machine()}"
    if version[:2] < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        return problem(
            "python", SwarmError, f"{seen}; {wanted} or newer is needed",
            f"Install Python {wanted} or newer, and swarmtrain with it.",
        )  # fmt: skip
    return ok("python", seen, version=text)


# ---------------------------------------------------------------- torch


async def probe_torch() -> tuple[dict[str, Any], float]:
    """The child process's findings, and the seconds it took."""
    began_at = time.monotonic()
    done = await trio.run_process(
        module_command(_TORCH_MODULE),
        capture_stdout=True, capture_stderr=True, check=False,
    )  # fmt: skip
    seconds = time.monotonic() - began_at
    try:
        findings = json.loads(done.stdout)
    except ValueError:
        last_line = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        end = f"ended with code {done.returncode}"
        return {"error": f"its test process {end} {' '.join(last_line)[:200]}"}, seconds
    return dict(findings), seconds


def check_torch(findings: Mapping[str, Any], seconds: float) -> Check:
    if "error" in findings:
        return problem(
            "torch", SwarmError, f"PyTorch cannot be loaded: {findings['error']}",
            "Install swarmtrain again; its dependencies include a matching PyTorch.",
        )  # fmt: skip
    version, built_for = str(findings["torch"]), str(findings["built_for"])
    seen = f"{version}, built for {built_for}, loaded in {seconds:.1f} s"
    details: dict[str, Detail] = {"version": version, "load_seconds": round(seconds, 2)}
    if not version.startswith(TORCH_SERIES):
        return warning(
            "torch", f"{seen}; runs are tested with {TORCH_SERIES}x",
            f"Install torch {TORCH_SERIES}0, so that this machine computes the same as others.",
            **details,
        )  # fmt: skip
    return ok("torch", seen, **details)


def check_gpu(findings: Mapping[str, Any], device: str) -> Check:
    if device == "cpu":
        return skipped("gpu", "--device cpu was chosen")
    if "error" in findings:
        return skipped("gpu", "PyTorch cannot be loaded")
    devices, driver = findings["devices"], findings["driver"]
    by_driver = f"driver {driver}" if driver else ""
    if devices:
        first = {key: value for key, value in devices[0].items() if key != "rates"}
        words = (f"{first['name']}: {first['label']}", by_driver, first["details"])
        more = f", and {len(devices) - 1} more" if len(devices) > 1 else ""
        return ok(
            "gpu",
            f"{', '.join(filter(None, words))}, "
            f"{first['free_bytes'] / GIB:.1f} of {first['total_bytes'] / GIB:.1f} GiB free{more}",
            devices=len(devices), driver=driver, **first,
        )  # fmt: skip
    if "device_error" in findings and not findings["nvidia_hardware"]:
        return warning(
            "gpu", f"the GPU cannot be used: {findings['device_error']}",
            "Update its driver, or install a PyTorch that is built for it.", driver=driver,
        )  # fmt: skip
    if not driver and not findings["nvidia_hardware"]:
        return skipped("gpu", "PyTorch sees no GPU, and there is none of NVIDIA's; the CPU is used")
    if "device_error" in findings:
        return warning(
            "gpu", f"the GPU cannot be used: {findings['device_error']}",
            "Update the NVIDIA driver and restart the machine.", driver=driver,
        )  # fmt: skip
    if not str(findings["built_for"]).startswith("CUDA"):
        return warning(
            "gpu",
            f"an NVIDIA GPU is present, but PyTorch {findings['torch']} is built without CUDA",
            "Install a PyTorch that is built for CUDA to use the GPU.",
            driver=driver,
        )  # fmt: skip
    return warning(
        "gpu",
        f"an NVIDIA GPU is present ({by_driver or 'driver of unknown version'}), but PyTorch does "
        "not see it",
        "Install or update the NVIDIA driver and restart the machine.", driver=driver,
    )  # fmt: skip


def check_device(
    findings: Mapping[str, Any], wanted: str, permitted: Callable[[Device], MemoryOffer]
) -> tuple[Check, Device | None]:
    """The device that `join` would choose, by the same rule, with the memory that is
    `permitted`."""
    listed = [listed_accelerator(entry) for entry in findings.get("devices", ())]
    try:
        device = choose_device(wanted, None, listed)
    except CapacityError as error:
        return problem(
            "device", CapacityError, str(error), "Use --device auto to use what this machine has."
        ), None
    whole_memory = device.memory
    device = device.offering(permitted(device))
    details: dict[str, Detail] = {"device": device.name, "memory_bytes": device.memory_bytes}
    offered = f"{device.name}: {device.label}, {device.memory} to offer"
    if device.memory != whole_memory:
        offered += ", as the preferences leave no more"
    if device.host_bytes is not None:
        details["host_bytes"] = device.host_bytes
        details |= {} if device.rates is None else asdict(device.rates)
        offered += f"; {_rates_text(device.rates)}"
    return ok("device", offered, **details), device


def _rates_text(rates: DeviceRates | None) -> str:
    if rates is None:
        return "how fast it copies and computes could not be measured"
    float32, bfloat16 = rates.float32_flops_per_second, rates.bfloat16_flops_per_second
    return (
        f"it copies {rate_text(rates.copied_bytes_per_second)} from and to the host's memory, and "
        f"computes {float32 / 1e12:.3g} TFLOP/s in float32 and {bfloat16 / 1e12:.3g} in bfloat16"
    )


def fit_device(check: Check, device: Device | None, smallest: StageNeeds | None) -> Check:
    """The same check, once the run's needs are known."""
    if device is None or smallest is None:
        return check
    offer, memory = device.memory, smallest.memory
    seen = (
        f"{check.seen}; the run's smallest stage has {count_text(smallest.parameters)} parameters "
        f"and takes {_taken_text(offer, memory)}"
    )
    details = {
        **check.details, "smallest_stage": str(memory),
        "parameters": smallest.parameters, "layers": smallest.layers,
    }  # fmt: skip
    if not offer.holds(memory):
        return problem(
            "device", CapacityError, seen,
            "Close other programs to free memory, or ask the organiser for smaller stages.",
            **details,
        )  # fmt: skip
    plan = memory_plan(offer, smallest)
    speed = round(plan.speed, 2)
    return ok(
        "device", f"{seen}; {_plan_text(plan, smallest.layers)}", **details,
        recomputed_layers=plan.recomputed_layers, streamed_bytes=plan.streamed_bytes, speed=speed,
    )  # fmt: skip


def _taken_text(offer: MemoryOffer, memory: StageMemory) -> str:
    """The memory that the stage takes, and where its optimizer is."""
    if offer.host_bytes is None:
        return (
            f"{memory_text(memory.device_bytes + memory.host_bytes)} of memory with its optimizer"
        )
    return f"{memory}, where its optimizer is"


def _plan_text(plan: MemoryPlan, layers: int) -> str:
    copied = ""
    if plan.streamed_bytes:
        copied = (
            f" and {memory_text(plan.streamed_bytes)} of weights copied from the host's memory for "
            "each pass"
        )
    return (
        f"with {plan.recomputed_layers:g} of {layers} layer{'' if layers == 1 else 's'} recomputed "
        f"in the backward pass{copied}, it is computed at {plan.speed:.2f} of full speed"
    )


async def check_self_test(device: Device, seconds: float) -> Check:
    """Test the device with all cores but one, as joining does."""
    threads = max(1, usable_cores() - 1)
    with tempfile.TemporaryDirectory(prefix="swarmtrain-doctor-") as folder:
        found = await run_self_test(device, threads, seconds, Path(folder))
    details: dict[str, Detail] = {
        "rounds": found.rounds, "test_seconds": round(found.seconds, 2),
        "memory_bytes": found.memory_bytes, "arithmetic": found.arithmetic,
    }  # fmt: skip
    if found.fault:
        return problem("self-test", MachineError, found.fault, f"{ADVICE}.", **details)
    return ok("self-test", passed_text(found), **details)


# ---------------------------------------------------------------- the home folder


def check_home(home: Home) -> tuple[Check, Identity | None, bool]:
    """The check, the identity stored there, and whether a client is running there."""
    path = home.path
    parent = existing_parent(path)
    if parent != path:
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            return _unusable(path, f"{parent} cannot be written to"), None, False
        return (
            ok("home", f"{path} does not exist yet; joining creates it", path=str(path)),
            None,
            False,
        )
    if not path.is_dir() or not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return _unusable(path, "it is not a writable folder"), None, False
    if home.is_of_another_user:
        return _unusable(path, "it belongs to another user of this machine"), None, False
    try:
        identity: Identity | None = Identity.load(home.identity_path)
    except FileNotFoundError:
        identity = None
    except ConfigurationError as error:
        seen = str(error)
        return problem(
            "home", ConfigurationError, seen, "Do as this message says.", path=str(path)
        ), None, False  # fmt: skip
    if is_locked(path / "lock"):
        return warning(
            "home", f"a client is already running in {path}",
            "Nothing to do if it is yours; a second client needs a folder of its own (--home).",
            path=str(path), client_running=True,
        ), identity, True  # fmt: skip
    identity_text = "no identity yet" if identity is None else f"peer {identity.peer_id}"
    return (
        ok("home", f"{path}, {identity_text}", path=str(path), client_running=False),
        identity,
        False,
    )


def existing_parent(path: Path) -> Path:
    """The nearest folder at or above `path` that can be seen to exist: its disk is the one that is
    used."""
    while not os.path.exists(path):  # noqa: PTH110 (Path.exists raises in another user's folder)
        path = path.parent
    return path


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock; the file is not created."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # the file system has no locks; a client says so at its start
    finally:
        os.close(handle)
    return False


def check_disk(path: Path, free_bytes: int | None = None) -> Check:
    """Whether there is room for stage states; training data takes what is left for it."""
    if free_bytes is None:
        try:
            free_bytes = shutil.disk_usage(existing_parent(path)).free
        except OSError as error:
            return problem(
                "disk", StorageError, f"the disk of {path} cannot be read: {error.strerror}",
                "Choose another folder with --home.",
            )  # fmt: skip
    seen = f"{free_bytes / GIB:.1f} GiB free"
    details = {"free_bytes": free_bytes}
    if free_bytes < MIN_DISK_BYTES:
        return problem(
            "disk", StorageError, seen,
            "Free some space, or choose a folder on another disk with --home.", **details,
        )  # fmt: skip
    if free_bytes < COMFORTABLE_DISK_BYTES:
        return warning(
            "disk", f"{seen}; that is little for a larger model",
            "Free some space, or choose a folder on another disk with --home.", **details,
        )  # fmt: skip
    return ok("disk", seen, **details)


def _unusable(path: Path, why: str) -> Check:
    return problem(
        "home", StorageError, f"{path} cannot be used: {why}",
        "Choose another folder with --home.", path=str(path),
    )  # fmt: skip


# ---------------------------------------------------------------- hivemind


async def check_p2pd() -> Check:
    """Start hivemind's process with p2pd, as joining does, in a temporary folder."""
    fix = "Nothing to do: the all-reduce uses libp2p only instead."
    with tempfile.TemporaryDirectory(prefix="swarmtrain-doctor-") as folder:
        worker = AveragingWorker(AveragingOptions(home=Path(folder)))
        begun = time.monotonic()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run)
            with trio.move_on_after(P2PD_SECONDS):
                await worker.settled()
            available, reason = worker.available, worker.reason
            seconds = time.monotonic() - begun
            nursery.cancel_scope.cancel()
    if available:
        return ok("p2pd", f"works, started in {seconds:.1f} s", start_seconds=round(seconds, 2))
    return warning("p2pd", f"does not work here: {reason}", fix)
