"""`swarm-coordinator log --to opentelemetry`: a receiver gets each step once, across starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kits.coordinator import run as run_kit
from kits.coordinator.otlp_receiver import OtlpReceiver, otlp_receiver, values
from kits.coordinator.shell_world import make_run
from kits.loaded_modules import loaded
from swarm_coordinator.cli.main import run
from swarm_coordinator.core.events import Note, RolledBack, RunFinished
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_shared.base.types import Version

STEPS = 4


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Steps 1 to 3 of 4, with their times."""
    folder = make_run(tmp_path / "a run", steps=STEPS)
    steps = [record for n in (1, 2, 3) for record in (run_kit.step(n), run_kit.times(n))]
    run_kit.one_start(folder, Note("Anna was admitted", run_kit.ANNA), *steps)
    return folder


def words(folder: RunFolder, endpoint: str, *more: str) -> list[str]:
    return ["log", str(folder.path), "--to", "opentelemetry", "--endpoint", endpoint, *more]


def roots(receiver: OtlpReceiver) -> list[tuple[object, object]]:
    """Step and repetition of each trace."""
    found = [values(spans[0].attributes) for spans in receiver.traces()]
    return [(one["swarm.step"], one["swarm.step.repetition"]) for one in found]


def test_it_continues_where_it_stopped_and_sends_nothing_twice(
    folder: RunFolder, receiver: OtlpReceiver
) -> None:
    assert run(words(folder, receiver.url, "--once")) == 0
    assert roots(receiver) == [(1, 0), (2, 0), (3, 0)]
    first = receiver.traces()[0]
    assert len(first) == 1 + len(run_kit.times(1).parts)
    assert [event.name for event in first[0].events] == ["Anna was admitted"]
    receiver.requests.clear()
    assert run(words(folder, receiver.url, "--once")) == 0
    assert receiver.requests == []
    run_kit.one_start(
        folder, RolledBack(Version(2), "all were lost"), run_kit.step(3, attempt=2),
        run_kit.times(3), run_kit.step(4, attempt=3), run_kit.times(4), RunFinished(Version(4)),
    )  # fmt: skip
    assert run(words(folder, receiver.url)) == 0
    assert roots(receiver) == [(3, 1), (4, 0)]


def test_the_environment_names_the_receiver_too(
    folder: RunFolder, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    assert run(["log", str(folder.path), "--to", "opentelemetry", "--once"]) == 0
    assert roots(receiver) == [(1, 0), (2, 0), (3, 0)]


def test_nothing_is_lost_to_a_receiver_that_takes_nothing(
    folder: RunFolder, receiver: OtlpReceiver, capsys: pytest.CaptureFixture[str]
) -> None:
    receiver.status = 400
    assert run(words(folder, receiver.url)) == 8
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2, said
    assert "the OTLP/HTTP receiver did not take the spans" in said[1]
    assert "Bad Request" in said[1]
    receiver.status = 200
    assert run(words(folder, receiver.url, "--once")) == 0
    assert roots(receiver) == [(1, 0), (2, 0), (3, 0)]


def test_a_receiver_that_is_down_is_an_error_of_one_sentence(
    folder: RunFolder, receiver: OtlpReceiver, capsys: pytest.CaptureFixture[str]
) -> None:
    with otlp_receiver() as ended:
        url = ended.url
    assert run(words(folder, url)) == 8
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2, said
    assert "this command continues where it stopped" in said[1]


def test_packages_that_are_missing_are_named_with_what_installs_them(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(
        sys.modules, "swarm_coordinator.tracking.opentelemetry_traces", raising=False
    )
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)  # type: ignore[arg-type]
    assert run(words(folder, "http://localhost:4318")) == 3
    said = capsys.readouterr().err
    assert "`pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http`" in said
    assert "pip install 'swarmtrain[log]'" in said
    assert said.count("\n") == 1


def test_the_other_targets_load_no_opentelemetry(folder: RunFolder) -> None:
    code = (
        "import sys\nfrom swarm_coordinator.cli.main import run\n"
        "assert run(['log', sys.argv[1], '--to', 'jsonl', '--once']) == 0"
    )
    assert loaded(code, ["opentelemetry.sdk"], folder.path) == []


def test_an_endpoint_is_of_opentelemetry_alone(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    to_jsonl = ["log", str(folder.path), "--to", "jsonl", "--endpoint", "http://localhost:4318"]
    assert run(to_jsonl) == 2
    assert "--to opentelemetry only" in capsys.readouterr().err
    assert run(words(folder, "localhost:4318")) == 2
    assert "is not the address of an OTLP/HTTP receiver" in capsys.readouterr().err
