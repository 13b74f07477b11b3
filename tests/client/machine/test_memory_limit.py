"""The operating system's limit on the memory of a child process."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from swarm_client.machine.memory_limit import OVERHEAD_BYTES, limit_memory, private_allowance

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux limits another process's private memory"
)

MIB = 2**20
GREEDY = """
import sys
taken = []
print("ready", flush=True)
sys.stdin.readline()
try:
    while len(taken) < 256:
        taken.append(bytearray(2**20))
except MemoryError:
    pass
print(len(taken), flush=True)
"""


def test_a_process_gets_the_memory_that_it_may_take_and_no_more():
    with subprocess.Popen(
        [sys.executable, "-c", GREEDY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        limit = limit_memory(child.pid, 64 * MIB)
        assert limit is not None
        assert resource.prlimit(child.pid, resource.RLIMIT_DATA) == (limit, limit)
        output, _ = child.communicate(b"\n")
    assert 48 <= int(output) <= 64


def test_a_process_that_has_ended_has_no_limit():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert limit_memory(child.pid, 64 * MIB) is None


def test_the_allowance_is_the_offer_without_shared_memory_and_the_runtime_s_overhead():
    assert private_allowance(8 * MIB, 0, 0) == 8 * MIB + OVERHEAD_BYTES
    assert private_allowance(8 * MIB, 3 * MIB, 0) == 5 * MIB + OVERHEAD_BYTES
    assert private_allowance(8 * MIB, 9 * MIB, 0) == OVERHEAD_BYTES
    assert private_allowance(0, 0, 4) - private_allowance(0, 0, 0) == 4 * 16 * MIB
