"""Clients of other protocol versions join a real coordinator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kits.coordinator.shell_world import make_run
from swarm_coordinator.demo.local_swarm import LocalSwarm
from swarm_coordinator.demo.subprocesses import Subprocesses
from swarm_shared.base.errors import VersionError
from swarm_shared.protocol.versions import PROTOCOL_VERSIONS

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

PATIENCE_SECONDS = 120.0
TESTS = Path(__file__).parents[1]
OLDER, NEWER = PROTOCOL_VERSIONS.oldest - 1, PROTOCOL_VERSIONS.newest + 1


def join(oldest: int, newest: int, invite: str, home: Path) -> subprocess.CompletedProcess[str]:
    versions = (str(oldest), str(newest))
    words = ("join", invite, "--home", str(home), "--device", "cpu", "--threads", "1")
    return subprocess.run(
        [sys.executable, "-m", "kits.runs.other_version", *versions, *words],
        capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False, cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS)}, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_a_client_without_a_common_version_is_told_to_update_and_ends(tmp_path: Path) -> None:
    make_run(tmp_path / "a run")
    with Subprocesses() as children:
        invite = LocalSwarm(tmp_path / "a run", children).start_coordinator()
        older = join(OLDER, OLDER, invite, tmp_path / "older")
        newer = join(NEWER, NEWER + 1, invite, tmp_path / "newer")
    for done, advice in (
        (older, "update swarmtrain on this machine with `swarm-client update`, then join again"),
        (newer, "or ask the organiser to update the coordinator, then join again"),
    ):
        assert done.returncode == VersionError.exit_code, done
        [sentence] = done.stderr.splitlines()
        assert sentence.startswith("swarm-client: error: this run's coordinator (swarmtrain ")
        assert sentence.endswith(advice)
        assert "trying again" not in done.stdout
