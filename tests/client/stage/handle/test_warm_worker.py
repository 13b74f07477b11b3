"""The environment of a stage worker, and that the C library understands it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from swarm_client.stage.handle.warm_worker import KEEP_FREED_MEMORY, TUNABLES, _tunables

RESIDENT_AFTER_FREEING = """
import ctypes

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
blocks = [libc.malloc(2**20) for _ in range(256)]
for block in blocks:
    ctypes.memset(block, 1, 2**20)
for block in blocks:
    libc.free(block)
print(resident_mib())
"""


def resident_mib(tunables: str) -> int:
    """Resident memory of a process that has taken and freed 256 blocks of 1 MiB."""
    command = [sys.executable, "-c", RESIDENT_AFTER_FREEING]
    environment = {**os.environ, TUNABLES: tunables}
    return int(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)


def test_the_users_own_settings_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TUNABLES, raising=False)
    assert _tunables() == KEEP_FREED_MEMORY
    monkeypatch.setenv(TUNABLES, "glibc.malloc.tcache_count=0")
    assert _tunables() == f"{KEEP_FREED_MEMORY}:glibc.malloc.tcache_count=0"


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="not glibc")
def test_freed_memory_stays_with_a_worker() -> None:
    assert resident_mib("") < 128
    assert resident_mib(KEEP_FREED_MEMORY) > 256
