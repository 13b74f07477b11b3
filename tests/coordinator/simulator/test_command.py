"""`swarm-coordinator simulate`: a run on a virtual clock, and clear answers to bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kits.coordinator.commands import complaint
from kits.coordinator.shell_world import make_run
from swarm_coordinator.cli.main import run
from swarm_coordinator.simulator.trace import (
    HEADER,
    TraceEvent,
    parse_trace,
    read_trace,
    trace_text,
)
from swarm_shared.base.errors import DataError

FLEET = {
    "format": "swarmtrain-fleet-1",
    "classes": [
        {
            "name": "a desktop", "machines": 6, "teraflops": 1e-4, "spread": 0.3, "memory_gib": 8,
            "up_mbit": 100, "down_mbit": 400, "latency_ms": 10,
        }
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("simulate") / "a run"
    make_run(path)
    (path / "fleet.json").write_text(json.dumps(FLEET))
    return path


def simulated(folder: Path, *arguments: str, hash_seed: str = "0") -> dict[str, Any]:
    """The document of a simulation in a separate process."""
    out = folder / "out.json"
    words = ["simulate", str(folder), "--fleet", str(folder / "fleet.json"), "--hours", "0.1"]
    subprocess.run(
        [sys.executable, "-m", "swarm_coordinator", *words, *arguments, "--json", out],
        env={**os.environ, "PYTHONHASHSEED": hash_seed}, check=True, capture_output=True,
    )  # fmt: skip
    document: dict[str, Any] = json.loads(out.read_text())
    del document["wall_seconds"]
    return document


@pytest.mark.parametrize("level", ["fluid", "microbatches"])
def test_the_same_seed_gives_the_same_run_in_every_figure(folder: Path, level: str) -> None:
    words = ("--trace", "spot:losses_per_hour=20", "--level", level)
    first = simulated(folder, *words, "--seed", "7", hash_seed="1")
    again = simulated(folder, *words, "--seed", "7", hash_seed="2")
    other = simulated(folder, *words, "--seed", "8")
    assert first == again
    assert first["steps"] > 0
    assert first["crashes"] > 0
    assert first["series"] != other["series"]


def test_a_trace_that_was_saved_gives_the_run_that_its_model_gave(folder: Path) -> None:
    saved = folder / "saved.trace"
    model = simulated(folder, "--trace", "home:on_hours=0.05", "--save-trace", str(saved))
    recorded = simulated(folder, "--trace", str(saved))
    assert read_trace(saved)
    assert recorded["joins"] == model["joins"]
    assert recorded["crashes"] == model["crashes"]
    assert recorded["steps"] == pytest.approx(model["steps"], abs=2)


def test_a_simulation_prints_its_result_and_changes_nothing_in_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    words = ["simulate", str(folder), "--fleet", "5", "--trace", "steady", "--hours", "0.05"]
    assert run(words) == 0
    told = capsys.readouterr().out
    assert "tokens/s" in told
    assert "5 joined, 0 left, 0 crashed" in told
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_the_report_has_the_audits_and_the_liars_that_they_have_found(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = folder / "eight.json"
    fleet.write_text(json.dumps({**FLEET, "classes": [{**FLEET["classes"][0], "machines": 8}]}))
    words = ["simulate", str(folder), "--fleet", str(fleet), "--trace", "steady", "--hours", "0.2"]
    assert run([*words, "--liars", "0.25", "--level", "microbatches"]) == 0
    told = capsys.readouterr().out
    assert "liars: 2 of 2 found and expelled, the median one in its cell" in told
    assert "0 verdicts against honest machines" in told


def test_a_run_that_cannot_begin_reports_what_it_waits_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", str(folder), "--fleet", "1", "--trace", "steady", "--hours", "0.05"]
    assert run(words) == 0
    told = capsys.readouterr().out
    assert "no step was made" in told
    assert "needs 1 peer" in told


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--fleet", "0", "--trace", "steady"], 2, "a fleet has 1 to 1,000,000 machines, not 0"),
        (["--fleet", "nothing.json", "--trace", "steady"], 5, "cannot be read"),
        (["--fleet", "{run}/run.toml", "--trace", "steady"], 5, "is not a fleet"),
        (
            ["--fleet", "{run}/data/shards.json", "--trace", "steady"],
            5,
            "is not a fleet (format: Input should be",
        ),
        (["--fleet", "5", "--trace", "unheard"], 2, "models are steady, home, spot"),
        (["--fleet", "5", "--trace", "spot:bulk=x"], 2, "'bulk=x' is no parameter of spot"),
        (["--fleet", "5", "--trace", "spot:bulk=0.5"], 2, "bulk must be at least 1"),
        (["--fleet", "5", "--trace", "home:availability=2"], 2, "availability must be"),
        (["--fleet", "5", "--trace", "home:on_hours=0"], 2, "on_hours must be"),
        (["--fleet", "5", "--trace", "{run}/run.toml"], 5, "is not a trace"),
        (["--fleet", "5", "--trace", "steady", "--hours", "0"], 2, "--hours"),
        (["--fleet", "9999", "--trace", "steady", "--level", "microbatches"], 2, "--level fluid"),
        (
            ["--fleet", "5", "--trace", "steady", "--level", "fluid", "--liars", "0.5"],
            2,
            "use --level microbatches",
        ),
    ],
)
def test_wrong_input_is_answered_with_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, sentence: str
) -> None:
    words = [word.replace("{run}", str(folder)) for word in words]
    assert run(["simulate", str(folder), *words]) == code
    assert sentence in complaint(capsys)


def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", str(tmp_path), "--fleet", "5", "--trace", "steady"]) != 0
    assert str(tmp_path) in capsys.readouterr().err


# ---------------------------------------------------------------- the trace format


def test_a_trace_is_read_as_it_was_written() -> None:
    changes = [
        TraceEvent(0.0, "join", "a"),
        TraceEvent(1.5, "leave", "a"),
        TraceEvent(2.25, "join", "a"),
    ]
    assert parse_trace(trace_text(changes, "two\nlines"), "here") == changes


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["1 join"], "line 2: it must be SECONDS KIND NAME"),
        (["x join a"], "line 2: 'x' is not a number of seconds"),
        (["-1 join a"], "line 2: '-1' is not a number of seconds"),
        (["nan join a"], "line 2: 'nan' is not a number of seconds"),
        (["1 comes a"], "line 2: 'comes' is none of join, leave, crash"),
        (["1 join a", "0.5 join b"], "line 3: time goes backwards"),
        (["1 join a", "2 join a"], "line 3: a is there already"),
        (["1 leave a"], "line 2: a is not there"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(lines: list[str], sentence: str) -> None:
    with pytest.raises(DataError) as raised:
        parse_trace("\n".join([HEADER, *lines]), "the trace")
    assert sentence in str(raised.value)
