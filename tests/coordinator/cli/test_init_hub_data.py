"""`swarm-coordinator init` with a data set of a hub, against a hub on this machine."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import huggingface_hub.file_download
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from kits.coordinator.commands import complaint
from kits.hub.fake_hub import TOKEN, FakeHub, FakeRepository, fake_hub
from swarm_coordinator.cli.main import run as run_command
from swarm_coordinator.durability.run_files import changed_settings, load_manifest, load_settings
from swarm_coordinator.run_creation import hub_corpus
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.run_dir.shard_index import read_shard_index

NAME = "ada/texts"
ADDRESS = f"hf://datasets/{NAME}"
CARD = {".gitattributes": b"*.parquet filter=lfs", "README.md": b"Some texts.", "texts.py": b"1/0"}
"""What else a repository has; the hub writes the first of them."""
SMALL = [
    f"--set=model.{name}={value}"
    for name, value in (
        ("hidden_size", 16), ("intermediate_size", 16), ("heads", 2), ("key_value_heads", 2),
        ("sequence_length", 16),
    )
]  # fmt: skip


def texts(name: str) -> list[str]:
    return [f"{name}, text {n}: " + "the quick brown fox "[n % 9 :] * 3 for n in range(20)]


def table(name: str, column: str = "text") -> bytes:
    target = io.BytesIO()
    parquet.write_table(pyarrow.table({column: texts(name)}), target)
    return target.getvalue()


def lines(name: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts(name)).encode()


def arrow(name: str) -> bytes:
    content, target = pyarrow.table({"text": texts(name)}), io.BytesIO()
    with pyarrow.ipc.new_stream(target, content.schema) as writer:
        writer.write_table(content)
    return target.getvalue()


ALL_KINDS = {
    "data/train-0.parquet": table("a"),
    "data/train-1.arrow": arrow("b"),
    "data/train-2.jsonl.gz": gzip.compress(lines("c")),
    "data/train-3.jsonl.zst": zstandard.ZstdCompressor().compress(lines("d")),
    "data/train-4.jsonl": lines("e"),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub(monkeypatch, tmp_path / "home") as served:
        yield served


def serve(hub: FakeHub, *commits: dict[str, bytes], name: str = NAME) -> FakeRepository:
    hub.datasets[name] = FakeRepository(commits=[CARD | commit for commit in commits])
    return hub.datasets[name]


def init(run: Path, data: str | Path, *options: str) -> int:
    return run_command(
        ["init", str(run), f"--data={data}", "--tokenizer=bytes", "--stages=2", *SMALL, *options]
    )


def shards(run: Path) -> dict[str, bytes]:
    folder = RunFolder.open(run).data
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".json"}


def written(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def fetched(hub: FakeHub) -> list[str]:
    """Files whose content was sent, in order."""
    asked = [request for request in hub.requests if request.startswith("GET /datasets/")]
    return [request.split("/resolve/")[1].split("/", 1)[1] for request in asked]


def test_the_shards_are_those_of_the_same_files_in_a_folder(
    tmp_path: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "folder", ALL_KINDS)
    held_back = {"data/test-0.parquet": table("t"), "data/validation.jsonl": lines("v")}
    repository = serve(hub, ALL_KINDS | held_back)
    assert init(tmp_path / "of-hub", ADDRESS) == 0
    said = capsys.readouterr().out
    assert f"{ADDRESS} is at commit {repository.head}\n" in said
    assert f"reading {ADDRESS}@{repository.head} (5 file(s), " in said
    assert "without 2 file(s) of test and validation splits)" in said
    assert "fetching 5 file(s), " in said
    assert [name for name in fetched(hub) if name not in CARD] == sorted(ALL_KINDS)
    assert "texts.py" not in fetched(hub)

    assert init(tmp_path / "of-folder", folder) == 0
    assert shards(tmp_path / "of-hub") == shards(tmp_path / "of-folder")
    of_hub, of_folder = (RunFolder.open(tmp_path / name) for name in ("of-hub", "of-folder"))
    assert load_manifest(of_hub).data == load_manifest(of_folder).data
    address = f"{ADDRESS}@{repository.head}"
    assert load_settings(of_hub).data.source == address == read_shard_index(of_hub.data).source
    assert changed_settings(of_hub, load_settings(of_hub), load_manifest(of_hub)) == []
    # A part of the repository is like that part of the folder.
    assert init(tmp_path / "data-of-hub", f"{ADDRESS}/data") == 0
    assert init(tmp_path / "data-of-folder", folder / "data") == 0
    assert shards(tmp_path / "data-of-hub") == shards(tmp_path / "data-of-folder")
    assert init(tmp_path / "file-of-hub", f"{ADDRESS}/data/train-4.jsonl") == 0
    assert init(tmp_path / "file-of-folder", folder / "data/train-4.jsonl") == 0
    assert shards(tmp_path / "file-of-hub") == shards(tmp_path / "file-of-folder")


def test_a_revision_is_kept_as_its_commit(
    tmp_path: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = serve(hub, {"a.jsonl": lines("old")}, {"a.jsonl": lines("new")})
    repository.branches |= {"v1": 0, "refs/convert/parquet": 0}
    old, new = (repository.commit_id(number) for number in (0, 1))
    for run, revision, commit in (
        ("by-tag", "@v1", old), ("by-branch", "@refs/convert/parquet", old), ("newest", "", new),
        ("by-commit", f"@{old}", old),
    ):  # fmt: skip
        assert init(tmp_path / run, f"{ADDRESS}{revision}") == 0
        source = load_settings(RunFolder.open(tmp_path / run)).data.source
        assert source == f"{ADDRESS}@{commit}"
        assert f"is at commit {commit}" in capsys.readouterr().out
    assert shards(tmp_path / "by-tag") == shards(tmp_path / "by-branch")
    assert shards(tmp_path / "by-tag") == shards(tmp_path / "by-commit")
    assert shards(tmp_path / "by-tag") != shards(tmp_path / "newest")
    # The recorded source makes the same data again, when the branch has moved on.
    repository.commits.append({})
    source = load_settings(RunFolder.open(tmp_path / "newest")).data.source
    assert init(tmp_path / "again", source) == 0
    assert shards(tmp_path / "again") == shards(tmp_path / "newest")
    # The same as a setting.
    assert init(tmp_path / "set", "unused", f"--set=data.source={ADDRESS}@v1") == 0
    assert load_settings(RunFolder.open(tmp_path / "set")).data.source == f"{ADDRESS}@{old}"


def test_what_is_in_the_cache_is_neither_fetched_again_nor_needs_a_network(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    serve(hub, {"a.jsonl": lines("a"), "b.jsonl": lines("b")})
    assert init(tmp_path / "half", f"{ADDRESS}/a.jsonl") == 0
    assert init(tmp_path / "first", ADDRESS) == 0
    data = [name for name in fetched(hub) if name not in CARD]
    assert data == ["a.jsonl", "b.jsonl"]
    assert f"fetching 1 file(s), {len(lines('b')) / 1000:.3g} kB" in capsys.readouterr().out
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.requests)
    assert init(tmp_path / "offline", ADDRESS) == 0
    assert hub.requests[asked:] == []
    assert shards(tmp_path / "offline") == shards(tmp_path / "first")


def test_several_configurations_are_refused_with_the_choices(
    tmp_path: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {f"{name}/train-0.parquet": table(name) for name in ("large", "small")}
    serve(hub, files | {"small/test-0.parquet": table("test")})
    assert init(tmp_path / "run", ADDRESS) == 5
    said = complaint(capsys)
    assert f"{ADDRESS} has files in 2 folders" in said
    assert f"choose one, such as {ADDRESS}/large" in said
    assert not any(name.endswith(".parquet") for name in fetched(hub))
    for run, path in (("small", "small"), ("train", "*/train-*"), ("all", "**")):
        assert init(tmp_path / run, f"{ADDRESS}/{path}") == 0
    sizes = [sum(map(len, shards(tmp_path / run).values())) for run in ("small", "train", "all")]
    assert sizes == sorted(set(sizes))


def test_a_private_data_set_needs_the_token(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    serve(hub, {"a.jsonl": lines("a")}).private = True
    assert init(tmp_path / "run", ADDRESS) == 5
    assert f"there is no data set {NAME} at {hub.url}, unless it is private" in complaint(capsys)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert init(tmp_path / "run", ADDRESS) == 0


def test_what_the_hub_refuses_after_the_list_is_one_sentence(
    tmp_path: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = serve(hub, {"a.jsonl": lines("a"), "b.jsonl": lines("b")})
    assert init(tmp_path / "first", f"{ADDRESS}/a.jsonl") == 0
    repository.gated = True
    capsys.readouterr()
    assert init(tmp_path / "run", ADDRESS) == 5
    assert f"ask for it at {hub.url}/datasets/{NAME}, and log in" in complaint(capsys)
    assert not (tmp_path / "run").exists()


def test_a_broken_connection_is_resumed(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    # huggingface_hub waits a second before it goes on.
    quick = SimpleNamespace(sleep=lambda seconds: None)
    monkeypatch.setattr(huggingface_hub.file_download, "time", quick)
    # It keeps whole blocks of this many bytes.
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 100)
    repository = serve(hub, {"a.jsonl": lines("a")})
    path = f"/datasets/{NAME}/resolve/{repository.head}/a.jsonl"
    hub.breaks[path] = 1000
    assert init(tmp_path / "run", ADDRESS) == 0
    assert hub.breaks == {}
    assert hub.ranges == [(path, 1000)]
    folder = written(tmp_path / "folder", {"a.jsonl": lines("a")})
    assert init(tmp_path / "of-folder", folder) == 0
    assert shards(tmp_path / "run") == shards(tmp_path / "of-folder")


def test_progress_is_reported(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(hub_corpus, "REPORT_SECONDS", 0.0)
    serve(hub, {"a.jsonl": lines("a"), "b.jsonl": lines("b")})
    assert init(tmp_path / "run", ADDRESS) == 0
    said = capsys.readouterr().out
    kilobytes = len(lines("a")) / 1000
    assert f"fetched {kilobytes:.3g} kB of {2 * kilobytes:.3g} kB (50 %), " in said
    assert f"fetched {2 * kilobytes:.3g} kB of {2 * kilobytes:.3g} kB (100 %), " in said


def test_a_disk_that_is_too_small_is_found_before_anything_is_fetched(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    serve(hub, {"a.jsonl": lines("a")})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert init(tmp_path / "run", ADDRESS) == 7
    said = complaint(capsys)
    assert "and 1 kB are free; free some, set HF_HOME to a folder on another disk" in said
    assert "a.jsonl" not in fetched(hub)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("data", "code", "reason"),
    [
        ("ada/missing", 5, "there is no data set ada/missing at http"),
        ("ada/gated", 5, "ada/gated is given out on request only; ask for it at http"),
        ("ada/texts@v9", 5, "ada/texts at http"),
        ("ada/texts/nowhere", 5, "has no file or folder nowhere, but README.md, a.parquet"),
        ("ada/script", 5, "hf://datasets/ada/script has no file that can be read here; .parquet"),
        ("ada/texts/b.parquet", 5, "b.parquet has no column 'text', but sequence; name the one"),
        ("ada/texts/cut.parquet", 5, "cut.parquet cannot be read as parquet"),
        ("ada", 2, "has the form hf://datasets/ORG/NAME[@REVISION][/FOLDER_OR_GLOB], and not"),
    ],
)
def test_bad_input_is_one_sentence_with_its_exit_code_and_leaves_nothing(
    data: str, code: int, reason: str, tmp_path: Path, hub: FakeHub,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    serve(
        hub,
        {"a.parquet": table("a"), "b.parquet": table("b", "sequence"),
         "cut.parquet": table("c")[:-9]},
    )  # fmt: skip
    serve(hub, {"a.parquet": table("a")}, name="ada/gated").gated = True
    serve(hub, {}, name="ada/script")
    assert init(tmp_path / "run", f"hf://datasets/{data}") == code
    assert reason in complaint(capsys)
    assert {path.name for path in tmp_path.iterdir()} <= {"home"}


def test_without_a_network_it_is_one_sentence(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    serve(hub, {"a.jsonl": lines("a")})
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert init(tmp_path / "run", ADDRESS) == 8
    said = complaint(capsys)
    assert f"{hub.url} cannot be reached for {NAME} (" in said
    assert "offline mode is enabled" in said
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    assert init(tmp_path / "run", ADDRESS) == 8
    assert "http://127.0.0.1:1 cannot be reached" in complaint(capsys)
    assert not (tmp_path / "run").exists()


def test_a_failure_of_xet_is_one_sentence(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fails(*_: object, **__: object) -> str:
        raise RuntimeError("Data processing error: CAS service error\nmore")

    serve(hub, {"a.jsonl": lines("a")})
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fails)
    assert init(tmp_path / "run", ADDRESS) == 8
    assert f"a.jsonl of {NAME} cannot be fetched (Data processing error: CAS" in complaint(capsys)


@pytest.mark.parametrize(
    ("package", "file", "extras"),
    [
        ("huggingface_hub", "a.jsonl", "hf,data"),
        ("pyarrow", "a.parquet", "data"),
        ("zstandard", "a.jsonl.zst", "data"),
    ],
)
def test_a_missing_package_is_named_before_a_file_is_fetched(
    package: str, file: str, extras: str, tmp_path: Path, hub: FakeHub,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    serve(hub, {file: b"not even one"})
    monkeypatch.setitem(sys.modules, package, None)
    assert init(tmp_path / "run", ADDRESS) == 3
    assert f"pip install 'swarmtrain[{extras}]'" in complaint(capsys)
    assert file not in fetched(hub)
