"""Programs that tests start, and whose names they look for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def wait_until_it_is(process: subprocess.Popen[bytes], program: Path) -> None:
    """The kernel tells of an exec a moment before the process has its new name and words."""
    words = Path(f"/proc/{process.pid}/cmdline")
    while not words.read_bytes().startswith(bytes(program)):
        os.sched_yield()
