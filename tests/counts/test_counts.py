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


def test_a_byte_more_or_less_is_told_and_fails() -> None:
    for size, difference in ((101, "+1"), (99, "-1")):
        verdict = compare(changed(bytes={"a message": size}), COUNTED)
        assert verdict.worse == (
            f"a message: {size} bytes, 100 in the baseline ({difference})",
        )  # fmt: skip


def test_instructions_may_grow_by_the_tolerance_and_no_more() -> None:
    most = int(1000 * (1 + TOLERANCE))
    within = {"some work": {"instructions": most, "calls": 100}}
    beyond = {"some work": {"instructions": most + 1, "calls": 100}}
    assert compare(changed(instructions=within), COUNTED).worse == ()
    [sentence] = compare(changed(instructions=beyond), COUNTED).worse
    assert sentence == "some work: 1,031 instructions, 1,000 in the baseline (+3.1%, 3% allowed)"


def test_fewer_instructions_do_not_fail_and_are_told() -> None:
    verdict = compare(
        changed(instructions={"some work": {"instructions": 500, "calls": 100}}), COUNTED
    )
    assert verdict.worse == ()
    assert "-50.0%" in verdict.notes[0]


def test_work_without_a_baseline_and_a_baseline_without_work_fail() -> None:
    now = changed(
        bytes={"another": 1}, instructions={"other work": {"instructions": 1, "calls": 1}}
    )
    assert sorted(compare(now, COUNTED).worse) == [
        "a message: is in the baseline and not counted any more",
        "another: is not in the baseline",
        "other work: is not in the baseline",
        "some work: is in the baseline and not counted any more",
    ]


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
