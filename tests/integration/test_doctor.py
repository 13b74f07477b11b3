"""`swarm-client doctor` with a real coordinator and a working volunteer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarm_coordinator.demo.subprocesses import wait_until
from swarm_shared.base.errors import NetworkError

pytestmark = [pytest.mark.process, pytest.mark.nightly]


def doctor(invite: str, home: Path) -> tuple[int, dict[str, Any], str]:
    """Return its exit code, its checks by id, and its standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "swarm_client", "doctor", invite, "--home", str(home),
         "--device", "cpu", "--json"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert document["exit_code"] == done.returncode
    assert document["duration_seconds"] < 30
    return done.returncode, {check["id"]: check for check in document["checks"]}, done.stderr


def test_the_doctor_reports_a_running_run_and_its_end(
    make_run: Callable[..., Any], tmp_path: Path
) -> None:
    run = make_run(1, 500, limits__starting_peers_per_stage=1)
    invite = run.swarm.start_coordinator()

    code, found, said = doctor(invite, tmp_path / "new")
    assert (code, said) == (0, ""), found
    in_order = ("torch", "device", "home", "invite", "coordinator", "version", "admission",
                "clock", "link")  # fmt: skip
    assert {id: found[id]["state"] for id in in_order} == dict.fromkeys(in_order, "ok")
    plan = found["device"]["details"]
    assert (plan["recomputed_layers"], plan["streamed_bytes"], plan["speed"]) == (0, 0, 1)
    assert plan["smallest_stage"]
    assert plan["parameters"] > 0
    assert plan["layers"] > 0
    assert not (tmp_path / "new").exists()

    run.swarm.start_volunteer(invite)
    run.wait_for_version(1)
    code, found, said = doctor(invite, run.swarm.home("volunteer-1"))
    assert (code, said) == (0, ""), found
    assert found["home"]["details"]["client_running"] is True
    before = run.version()
    wait_until(lambda: run.version() > before, run.swarm.children, 60, "training to go on")

    run.swarm.stop()
    code, found, said = doctor(invite, tmp_path / "new")
    assert (code, said) == (NetworkError.exit_code, "")
    assert found["coordinator"]["state"] == "problem"
    assert found["link"]["state"] == "skipped"
