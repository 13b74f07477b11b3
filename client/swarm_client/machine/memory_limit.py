"""A limit on the memory of a child process, which the operating system enforces (Linux).

The limit is RLIMIT_DATA: since Linux 4.7 it counts all private writable memory, so that a larger
allocation fails, and torch reports it as an error. Neither root nor a control group is needed.
docs/decisions, number 0031, has the alternatives and what is not counted: shared memory, which the
daemon sizes itself.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

OVERHEAD_BYTES = 2**30
"""Private memory, in bytes, that a worker may take beyond what is offered to its stage: for
microbatches that can be taken out again, an allocator's fragments, and encoding."""

THREAD_BYTES = 2 * 8 * 2**20
"""Private memory, in bytes, of one compute thread: the system counts the stacks of torch's thread
and of its helper in whole, 8 MiB each."""


def private_allowance(offered_bytes: int, shared_bytes: int, threads: int) -> int:
    """Return the private memory that a worker may take beyond its runtime.

    `offered_bytes` bounds the stage, `shared_bytes` of it lie in shared memory.
    """
    return max(0, offered_bytes - shared_bytes) + OVERHEAD_BYTES + threads * THREAD_BYTES


def limit_memory(pid: int, more_bytes: int) -> int | None:
    """Let a process take at most `more_bytes` of private memory beyond what it has.

    Returns the limit in bytes; None where the system has none, or when the process has ended.
    """
    if sys.platform != "linux":
        return None
    try:
        _, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
        limit = _private_bytes(pid) + more_bytes
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))
    except (OSError, ValueError):
        return None
    return limit


def _private_bytes(pid: int) -> int:
    """Return what RLIMIT_DATA counts for the process. ValueError when it has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no memory any more")
