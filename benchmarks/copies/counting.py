"""Counters of this process's copies, from `interpose.c`, which is preloaded on Linux."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swarm_shared.base.errors import CapacityError, SwarmError

SOURCE = Path(__file__).with_name("interpose.c")


@dataclass(slots=True)
class Copied:
    """Bytes copied in memory, to the kernel, and from the kernel."""

    memory: int = 0
    to_kernel: int = 0
    from_kernel: int = 0


def build(folder: Path) -> Path:
    """Build the library to preload; raises CapacityError where it cannot be built or loaded."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not sys.platform.startswith("linux") or compiler is None:
        raise CapacityError("counting copies requires Linux and a C compiler (install gcc)")
    library = folder / "interpose.so"
    options = ["-O2", "-shared", "-fPIC", "-fno-builtin"]
    command = [compiler, *options, "-o", str(library), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CapacityError(f"{SOURCE.name} does not compile here: {done.stderr.strip()}")
    return library


class Counter:
    """Counter of this process, which must have been started with the library preloaded."""

    def __init__(self) -> None:
        loaded = ctypes.CDLL(None)
        try:
            names = ("copies_in_memory", "copies_to_kernel", "copies_from_kernel")
            self._functions = [getattr(loaded, name) for name in names]
        except AttributeError as error:
            raise SwarmError("this process was started without the counting library") from error
        for function in self._functions:
            function.restype = ctypes.c_ulonglong

    def read(self) -> Copied:
        return Copied(*(function() for function in self._functions))

    @contextmanager
    def counting(self) -> Iterator[Copied]:
        """Count within the block; the yielded record is filled in at its end."""
        copied, before = Copied(), self.read()
        yield copied
        after = self.read()
        copied.memory = after.memory - before.memory
        copied.to_kernel = after.to_kernel - before.to_kernel
        copied.from_kernel = after.from_kernel - before.from_kernel
