"""`swarm-coordinator init` as a process: data and tokenizers of many kinds, and bad ones."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet
from tokenizers import Tokenizer, models

from kits.coordinator.commands import complaint
from swarm_coordinator.cli.main import run as run_command
from swarm_coordinator.durability.run_files import load_manifest
from swarm_coordinator.run_dir.folder import RunFolder

pytestmark = pytest.mark.timeout(300)

SMALL = [
    f"--set=model.{name}={value}"
    for name, value in (
        ("hidden_size", 16), ("intermediate_size", 16), ("heads", 2), ("key_value_heads", 2),
        ("sequence_length", 16),
    )
]  # fmt: skip
SEQUENCES = ["ACDEFGHIKL"[n % 10 :] + "MNPQRSTVWY"[: n // 7 + 1] * 3 for n in range(70)]


def init(run: Path, data: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "swarm_coordinator", "init", str(run), "--data", str(data)]
    return subprocess.run(
        [*command, *SMALL, *options], capture_output=True, text=True, check=False, timeout=200
    )


@pytest.fixture
def amino_acids(tmp_path: Path) -> Path:
    path = tmp_path / "amino-acids.txt"
    path.write_text("\n".join(["<eos>", *"ACDEFGHIKLMNPQRSTVWY"]) + "\n")
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The sequences in a folder of all kinds of files, with a duplicate and an empty one."""
    folder = tmp_path / "data"
    folder.mkdir()
    table = pyarrow.table({"sequence": SEQUENCES[:30]})
    parquet.write_table(table, folder / "a.parquet")
    with pyarrow.ipc.new_stream(str(folder / "b.arrow"), table.schema) as writer:
        writer.write_table(pyarrow.table({"sequence": [*SEQUENCES[30:40], None]}))
    lines = [json.dumps({"sequence": sequence}) + "\n" for sequence in SEQUENCES]
    (folder / "c.jsonl.gz").write_bytes(gzip.compress("".join(lines[40:50]).encode()))
    compressed = zstandard.ZstdCompressor().compress("".join(lines[50:60]).encode())
    (folder / "d.jsonl.zst").write_bytes(compressed)
    (folder / "e.jsonl").write_text("".join([*lines[60:], lines[3]]))
    (folder / "README.md").write_text("Sequences of amino acids; not one of them.")
    return folder


@pytest.mark.process
def test_a_folder_of_all_kinds_becomes_the_same_shards_for_any_number_of_threads(
    tmp_path: Path, data: Path, amino_acids: Path, monkeypatch: pytest.MonkeyPatch
):
    found = []
    for threads in (1, 2):
        monkeypatch.setenv("RAYON_NUM_THREADS", str(threads))
        run = tmp_path / f"run-{threads}"
        done = init(run, data, "--tokenizer", str(amino_acids), "--set=data.column=sequence")
        assert (done.returncode, done.stderr) == (0, "")
        assert "(without 1 file(s) that are not .jsonl, .parquet or .arrow)" in done.stdout
        assert f"data: {len(SEQUENCES)} document(s), " in done.stdout
        assert "left out: 1 exact and 0 near duplicate(s), 1 empty, 0 longer than " in done.stdout
        found.append(load_manifest(RunFolder.open(run)))
    assert found[0].data == found[1].data
    tokens = sum(shard.tokens for shard in found[0].data.shards)
    assert tokens == sum(map(len, SEQUENCES)) + len(SEQUENCES)
    assert found[0].model.vocabulary_size == 21


COLUMN = "--set=data.column=sequence"


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (["--data=cut.parquet", COLUMN], 5, "cut.parquet cannot be read as parquet"),
        (["--data=data"], 5, "a.parquet has no column 'text', but sequence; name the one with"),
        ([COLUMN, "--tokenizer=bep"], 5, "cannot read the tokenizer"),
        ([COLUMN, "--tokenizer=gaps.json"], 5, "gaps.json has no token that ends a document"),
        ([COLUMN, "--tokenizer=few.txt"], 5, "a.parquet:1: character 3 is 'D' (U+0044), for which"),
        (
            [COLUMN, "--tokenizer=amino-acids.txt", "--set=model.vocabulary_size=20"],
            3, "the tokenizer has 21 ids, but [model] vocabulary_size is 20; raise it to 21",
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("amino_acids")
def test_bad_input_is_one_sentence_with_its_exit_code_and_leaves_nothing(
    tmp_path: Path, data: Path, options: list[str], code: int, reason: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("cut.parquet").write_bytes((data / "a.parquet").read_bytes()[:-9])
    gaps = Tokenizer(models.WordLevel({"A": 1, "C": 2}, "A"))
    Path("gaps.json").write_text(gaps.to_str())
    Path("few.txt").write_text("A\nC\n")
    before = set(tmp_path.iterdir())
    seen = run_command(["init", "new", "--data=data", *SMALL, *options])
    assert reason in complaint(capsys)
    assert seen == code
    assert set(tmp_path.iterdir()) == before
