"""`swarm-client config`, as its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


def config(*words: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "swarm_client", "config", *words, "--home", str(home)]
    own = {name: value for name, value in os.environ.items() if name != "SWARM_NICE"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**own, **environment}
    )


def test_what_is_set_is_got_with_data_on_stdout_alone(tmp_path: Path) -> None:
    home = tmp_path / "a home"
    done = config("set", "cpu_percent", "50", home=home)
    assert (done.returncode, done.stdout) == (0, "")
    assert config("get", "cpu_percent", home=home).stdout == "50\n"
    assert config("get", "hours", home=home).stdout == "always\n"
    config("set", "gpu.all.vram_gib", "3", home=home)
    assert config("get", "gpu.7.vram_gib", home=home).stdout == "3\n"
    assert config("get", "hours_on.monday", home=home).stdout == "always\n"
    everything = json.loads(config("get", "--json", home=home, SWARM_MAX_CORES="2").stdout)
    assert everything["version"] == 1
    assert everything["preferences"]["cpu_percent"]["layer"] == "file"
    cores = everything["preferences"]["max_cores"]
    assert (cores["value"], cores["layer"], cores["where"]) == (2, "environment", "SWARM_MAX_CORES")
    assert "cpu_percent" in config("get", home=home).stdout
    assert config("set", "cpu_percent", "--default", home=home).returncode == 0
    assert config("get", "cpu_percent", home=home).stdout == "100\n"


def test_mistakes_are_one_sentence_and_an_exit_code(tmp_path: Path) -> None:
    for words, code in (
        (("set", "cpu_procent", "5"), 3),
        (("set", "cpu_percent", "0"), 3),
        (("set", "cpu_percent"), 2),
        (("get", "cpu"), 3),
    ):
        done = config(*words, home=tmp_path)
        assert (done.returncode, done.stdout) == (code, ""), words
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stderr
    (tmp_path / "preferences.toml").write_text("version = 7\n")
    done = config("validate", home=tmp_path)
    assert done.returncode == 10
    assert "newer" in done.stderr


def test_validate_and_schema_change_nothing(tmp_path: Path) -> None:
    assert config("validate", home=tmp_path).returncode == 0
    assert list(tmp_path.iterdir()) == []
    command = [sys.executable, "-m", "swarm_client", "config", "schema"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "cpu_percent" in json.loads(done.stdout)["properties"]
