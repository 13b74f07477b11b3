"""Programs that the governor looks for."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kits.runs.started_program import wait_until_it_is


@contextmanager
def started_copy_of_sleep(program: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of a program of that name, which only sleeps."""
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    with subprocess.Popen([program, "600"]) as process:
        wait_until_it_is(process, program)
        yield process
        process.kill()


@pytest.fixture
def game(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with started_copy_of_sleep(tmp_path / "Swarm-Game") as process:
        yield process
