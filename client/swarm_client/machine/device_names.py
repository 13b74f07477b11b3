"""Names of devices, as text: the only place besides the worker's door to them
(`swarm_client.stage.worker.accelerator`) that names a kind of accelerator.

`cpu` is the processor; `cuda:0` a GPU of NVIDIA's, or of AMD's where torch is built for ROCm, which
answers under the same name; `mps`, in full `mps:0`, the GPU of an Apple processor; `xpu:0` a GPU of
Intel's. torch is never imported here.
"""

from __future__ import annotations

import re

from swarm_shared.base.errors import UsageError

PROCESSOR = "cpu"
CUDA, MPS, XPU = "cuda", "mps", "xpu"

NAME_PATTERN = r"^(cpu|mps|mps:0|(cuda|xpu):[0-9]{1,3})$"
"""A device's name in torch's spelling."""

FORMS = "cpu, cuda:0, mps, xpu:0 or auto"
"""What can be given as a device, for messages."""

MAX_DEVICES = 64
"""Maximum number of devices. Each is a peer with processes of its own; machines with more GPUs run
several clients."""


def check_name(text: str) -> None:
    """UsageError unless the text names a device, or is `auto`."""
    if text != "auto" and re.fullmatch(NAME_PATTERN, text) is None:
        raise UsageError(f"--device {text!r} is not valid; give {FORMS}")


def split_names(text: str) -> list[str]:
    """The names of devices, which have commas between them. UsageError when they cannot be used
    together."""
    names = [name.strip() for name in text.split(",")]
    if len(names) > MAX_DEVICES:
        raise UsageError(
            f"{len(names)} devices were given; at most {MAX_DEVICES} can be used at once"
        )
    if len(names) > 1 and "auto" in names:
        raise UsageError("--device auto uses all devices; give no other device with it")
    for name in names:
        check_name(name)
    return names


def full_name(name: str) -> str:
    """The name with its number: `mps` is `mps:0`."""
    return f"{name}:0" if name == MPS else name


def number_of(name: str) -> int | None:
    """The number of an accelerator among those of its kind; None for the processor.

    Takes the id of a volunteer's device too, like `cuda:0#2`.
    """
    kind, _, number = name.partition("#")[0].partition(":")
    return None if kind == PROCESSOR else int(number or 0)


def is_cuda(name: str) -> bool:
    return name.partition(":")[0] == CUDA


def is_accelerator(name: str) -> bool:
    return number_of(name) is not None
