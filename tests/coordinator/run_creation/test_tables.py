"""Parquet and Arrow files as a stream of documents, and what is said of those that are none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import ipc, parquet

from swarm_coordinator.run_creation.corpus import TextCorpus, TextDocument, read_corpus
from swarm_coordinator.run_creation.split import plan_split
from swarm_coordinator.run_creation.tables import BATCH_ROWS
from swarm_shared.base.errors import ConfigurationError, DataError

TEXTS = [f"document {number} größer\n" for number in range(2 * BATCH_ROWS + 3)]
KINDS = ("parquet", "file.arrow", "stream.arrow")


def write_table(path: Path, columns: dict[str, Any], row_group: int = 100) -> Path:
    """Write a table as its name says: parquet, or Arrow's file or stream format."""
    table = pyarrow.table(columns)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=row_group)
        return path
    opened = ipc.new_stream if "stream" in path.name else ipc.new_file
    with opened(str(path), table.schema) as writer:
        writer.write_table(table, row_group)
    return path


def documents(path: Path, column: str = "text") -> Iterator[TextDocument]:
    corpus = read_corpus(str(path), column)
    assert isinstance(corpus, TextCorpus)
    return corpus.documents()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "texts",
    [
        pyarrow.array(TEXTS),
        pyarrow.array(TEXTS, pyarrow.large_string()),
        pyarrow.array(TEXTS, pyarrow.string_view()),
        pyarrow.array(TEXTS).dictionary_encode(),
    ],
    ids=["string", "large_string", "string_view", "dictionary"],
)
def test_each_row_is_a_document(tmp_path: Path, kind: str, texts: pyarrow.Array):
    path = write_table(tmp_path / f"data.{kind}", {"id": list(range(len(TEXTS))), "text": texts})
    found = list(documents(path))
    assert [document.text for document in found] == TEXTS
    assert [document.name for document in found[:2]] == [f"{path.name}:1", f"{path.name}:2"]
    assert not any(document.continues for document in found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_value_is_an_empty_document(tmp_path: Path, kind: str):
    path = write_table(tmp_path / f"data.{kind}", {"text": ["one", None, "", "two", "one"]})
    corpus = read_corpus(str(path))
    assert isinstance(corpus, TextCorpus)
    report = plan_split(corpus, 0.3, 1).report
    assert (report.documents, report.duplicates, report.empty) == (2, 1, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_tables_is_read_in_order_without_its_descriptions(tmp_path: Path, kind: str):
    for part, name in ((TEXTS[:9], f"a/0.{kind}"), (TEXTS[9:20], f"b/0.{kind}")):
        (tmp_path / name).parent.mkdir()
        write_table(tmp_path / name, {"text": part})
    (tmp_path / "README.md").write_text("a data set")
    assert [document.text for document in documents(tmp_path)] == TEXTS[:20]


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_column_is_refused_with_those_that_there_are(tmp_path: Path, kind: str):
    path = write_table(tmp_path / f"data.{kind}", {"id": [1, 2], "content": ["a", "b"]})
    with pytest.raises(DataError, match=r"no column 'text', but id, content; .*data\.column=NAME"):
        list(documents(path))
    with pytest.raises(DataError, match=r"column 'id' of .* holds int64 and not text"):
        list(documents(path, "id"))
    assert [document.text for document in documents(path, "content")] == ["a", "b"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_table_that_is_cut_short_is_refused(tmp_path: Path, kind: str, share: float):
    path = write_table(tmp_path / f"data.{kind}", {"text": TEXTS})
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=rf"{path.name} cannot be read as {path.suffix[1:]} \("):
        list(documents(path))


def test_a_damaged_parquet_is_refused(tmp_path: Path):
    path = write_table(tmp_path / "data.parquet", {"text": TEXTS}, row_group=1000)
    content = bytearray(path.read_bytes())
    content[1000:1400] = bytes(400)
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as parquet"):
        list(documents(path))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_text_is_named(tmp_path: Path, kind: str):
    path = write_table(tmp_path / f"data.{kind}", {"text": ["fine", "a\0b"]})
    with pytest.raises(DataError, match=r"row 2: its text has a NUL character"):
        list(documents(path))
    broken = pyarrow.array([b"fine", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    write_table(path, {"text": broken})
    with pytest.raises(DataError, match="can't decode byte 0xff"):
        list(documents(path))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_held_of_a_table_does_not_grow_with_it(tmp_path: Path, kind: str):
    held: dict[int, int] = {}
    for row_groups in (8, 32):
        texts = [f"{n:05} " * 1000 for n in range(128 * row_groups)]
        columns = {"text": texts, "other": ["x" * 4000] * len(texts)}
        path = write_table(tmp_path / f"{row_groups}.{kind}", columns, row_group=128)
        whole = sum(map(len, texts))
        del columns, texts
        before, most = pyarrow.total_allocated_bytes(), 0
        for _ in documents(path):
            most = max(most, pyarrow.total_allocated_bytes() - before)
        held[row_groups] = most
    assert held[32] <= 1.2 * held[8]
    assert held[32] < whole / 4


def test_without_pyarrow_a_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_table(tmp_path / "data.parquet", {"text": TEXTS})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'swarmtrain\[data\]'"):
        list(documents(path))
