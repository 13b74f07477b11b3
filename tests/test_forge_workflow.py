"""The forge's workflow calls what exists, by pinned actions, and says that it has not run."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from kits.skip_policy import TOOLS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
JOBS: dict[str, dict[str, Any]] = yaml.safe_load(TEXT)["jobs"]
COMMANDS = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]


def test_every_action_is_pinned_by_its_hash_and_names_the_version() -> None:
    uses = re.findall(r"uses: (.+)", TEXT)
    assert len(uses) == 2
    for one in uses:
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one)
    assert yaml.safe_load(TEXT)["permissions"] == {"contents": "read"}


def test_every_program_target_and_folder_that_it_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for command in COMMANDS:
        for program in re.findall(r"\.ci/\w+", command):
            assert os.access(ROOT / program, os.X_OK)
        assert set(re.findall(r"\bmake ([a-z-]+)", command)) <= targets
        for path in re.findall(r"\btests/[\w/]+", command):
            assert (ROOT / path).is_dir(), path
    called = " ".join(COMMANDS)
    assert ".ci/run" in called
    assert ".ci/nightly" in called


def test_each_night_only_the_nightly_tests_run_and_otherwise_all_others() -> None:
    nightly = [name for name, job in JOBS.items() if job["if"] == "github.event_name == 'schedule'"]
    assert nightly == ["nightly"]
    others = {job["if"] for name, job in JOBS.items() if name != "nightly"}
    assert others == {"github.event_name != 'schedule'"}


def test_tools_that_a_system_cannot_have_are_named_as_the_skip_policy_names_them() -> None:
    named = [job["env"]["SWARM_MAY_SKIP"] for job in JOBS.values() if "env" in job]
    assert len(named) == 2
    assert all(set(one.split(",")) == TOOLS.keys() for one in named)


def test_the_uv_of_windows_is_the_one_of_the_other_tests() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pinned,) = (d for d in extras["optional-dependencies"]["dev"] if d.startswith("uv=="))
    assert f"pip install {pinned}" in " ".join(COMMANDS)
