"""Counted bytes and instructions: the project against its baseline, and what the check says."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.counts.__main__ import BASELINE, conclude
from benchmarks.counts.comparison import TOLERANCE, VERSION, compare
from benchmarks.counts.exchange import exchanged
from benchmarks.counts.instructions import Meter, cost_of
from benchmarks.counts.messages import forward
from benchmarks.counts.workloads import WORKLOADS
from swarm_shared.base.errors import StorageError

ROOT = Path(__file__).parents[2]

COUNTED: dict[str, Any] = {
    "version": VERSION,
    "python": "3.11.7",
    "implementation": "CPython",
    "packages": {},
    "bytes": {"a message": 100},
    "instructions": {"some work": {"instructions": 1000, "calls": 100}},
}


def changed(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(COUNTED), **changes}


def test_nothing_takes_more_bytes_or_instructions_than_the_baseline_says(tmp_path: Path) -> None:
    """When it fails on purpose: make bench-counts ARGS=--accept, and commit the baseline."""
    accepted = tmp_path / "baseline.json"
    command = [sys.executable, "-m", "benchmarks.counts", "--accept", "--baseline", str(accepted)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    verdict = compare(json.loads(accepted.read_text()), json.loads(BASELINE.read_text()))
    assert verdict.worse == ()


def test_the_same_work_counts_the_same_every_time() -> None:
    work = WORKLOADS["volunteer: a choice among 32 routes"]
    assert cost_of(work) == cost_of(work)
    assert exchanged(forward(1)) == exchanged(forward(1))


def test_only_this_projects_own_code_is_counted() -> None:
    with Meter() as meter:
        json.dumps([{"a": number} for number in range(100)])
    assert meter.cost.instructions == 0


def instructions(count: int) -> dict[str, Any]:
    return {"instructions": {"some work": {"instructions": count, "calls": 100}}}


MOST = int(1000 * (1 + TOLERANCE))


@pytest.mark.parametrize(
    ("changes", "worse"),
    [
        ({"bytes": {"a message": 101}}, ["a message: 101 bytes, 100 in the baseline (+1)"]),
        ({"bytes": {"a message": 99}}, ["a message: 99 bytes, 100 in the baseline (-1)"]),
        (instructions(MOST), []),
        (
            instructions(MOST + 1),
            ["some work: 1,031 instructions, 1,000 in the baseline (+3.1%, 3% allowed)"],
        ),
        (instructions(500), []),
        (
            {"bytes": {"another": 1}, "instructions": {}},
            [
                "a message: is in the baseline and not counted any more",
                "another: is not in the baseline",
                "some work: is in the baseline and not counted any more",
            ],
        ),
    ],
    ids=["a byte more", "a byte less", "tolerated", "not tolerated", "fewer", "other work"],
)
def test_a_difference_fails_unless_it_is_tolerated(
    changes: dict[str, Any], worse: list[str]
) -> None:
    verdict = compare(changed(**changes), COUNTED)
    assert sorted(verdict.worse) == worse
    assert ("-50.0%" in " ".join(verdict.notes)) is (changes == instructions(500))


@pytest.mark.parametrize(("python", "compared"), [("3.11.99", True), ("3.13.0", False)])
def test_instructions_are_compared_within_a_minor_version_of_python(
    python: str, compared: bool
) -> None:
    twice = {"some work": {"instructions": 2000, "calls": 200}}
    verdict = compare(changed(python=python, instructions=twice), COUNTED)
    assert (len(verdict.worse) == 2) is compared
    assert bool(verdict.notes) is not compared


def test_a_baseline_of_another_form_is_refused() -> None:
    with pytest.raises(StorageError, match="--accept"):
        compare(COUNTED, changed(version=VERSION + 1))


def test_a_difference_is_told_with_the_way_to_accept_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps(COUNTED))
    conclude(COUNTED, path)
    assert "bytes are as in the baseline" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1"):
        conclude(changed(bytes={"a message": 98}), path)
    told = capsys.readouterr().err
    assert "counts: a message: 98 bytes, 100 in the baseline (-2)" in told
    assert "make bench-counts ARGS=--accept" in told
