from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_coordinator.run_creation import compressed_files
from swarm_coordinator.run_creation import corpus as corpus_module
from swarm_coordinator.run_creation.corpus import (
    ReadyShards,
    TextCorpus,
    read_corpus,
)
from swarm_coordinator.run_creation.split import plan_split
from swarm_shared.base.errors import DataError


def text_corpus(source: Path | str) -> TextCorpus:
    corpus = read_corpus(str(source))
    assert isinstance(corpus, TextCorpus)
    return corpus


def read(source: Path | str) -> list[tuple[str, str]]:
    return [(document.name, document.text) for document in text_corpus(source).documents()]


def test_the_standard_library_is_python_source_without_its_tests_in_a_fixed_order():
    documents = text_corpus("python-stdlib").documents()
    first = [next(documents).name for _ in range(50)]
    assert first == sorted(first)
    assert all(name.endswith(".py") for name in first)
    again = text_corpus("python-stdlib").documents()
    assert [next(again).name for _ in range(50)] == first
    names = {
        document.name.partition("#")[0] for document in text_corpus("python-stdlib").documents()
    }
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not [name for name in names if "site-packages" in name or name.startswith("test/")]


def test_a_folder_is_read_with_its_subfolders_in_order_without_hidden_files(tmp_path: Path):
    for name in ("b.txt", "a/z.md", "a/b/c.txt", ".hidden", ".git/config"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"text of {name} ü\r\n", newline="")
    names = ["a/b/c.txt", "a/z.md", "b.txt"]
    assert read(tmp_path) == [(name, f"text of {name} ü\r\n") for name in names]


def test_one_file_is_one_document_and_its_byte_order_mark_is_not_text(tmp_path: Path):
    file = tmp_path / "my text.txt"
    file.write_bytes(b"\xef\xbb\xbfhello\n")
    assert read(file) == [("my text.txt", "hello\n")]


def test_each_line_of_jsonl_is_a_document_and_blank_lines_are_none(tmp_path: Path):
    file = tmp_path / "some.jsonl"
    file.write_text('{"text": "one\\n"}\n\n{"id": 7, "text": "zw\\u00f6lf"}')
    assert read(file) == [("some.jsonl:1", "one\n"), ("some.jsonl:3", "zwölf")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "cut', "it is not JSON"),
        ('{"txt": "no", "id": 7}', "no field 'text', but txt, id"),
        ('["text"]', "it is not an object"),
        ('{"text": 7}', "its field 'text' is not text"),
        ('{"text": "a\\u0000b"}', "NUL"),
        ('{"text": "\\ud800"}', "surrogate"),
        ("[" * 100_000, "it is not JSON"),
    ],
)
def test_a_damaged_line_of_jsonl_is_named_with_its_number(tmp_path: Path, line: str, reason: str):
    file = tmp_path / "some.jsonl"
    file.write_text(f'{{"text": "one"}}\n{line}\n')
    with pytest.raises(DataError, match=rf"some\.jsonl, line 2: .*{reason}"):
        read(file)


def test_a_line_of_jsonl_that_is_not_utf_8_is_named(tmp_path: Path):
    file = tmp_path / "some.jsonl"
    file.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(DataError, match="line 1: it is not JSON"):
        read(file)


@given(
    st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")), max_size=8),
    st.booleans(), st.integers(1, 9),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_lines_are_those_of_the_file_whatever_the_blocks_and_the_longest_are_not_held(
    lines: list[bytes], ends: bool, size: int
):
    content = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    blocks = [content[start : start + size] for start in range(0, len(content), size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "MAX_RECORD_BYTES", 6)
        found = list(corpus_module._lines(blocks))
    assert (
        found
        == [line if len(line) <= 6 else None for line in content.removesuffix(b"\n").split(b"\n")][
            : content.count(b"\n") + (not content.endswith(b"\n") and content != b"")
        ]
    )


def test_a_line_longer_than_memory_should_hold_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(corpus_module, "MAX_RECORD_BYTES", 100)
    file = tmp_path / "some.jsonl"
    lines = [json.dumps({"text": text}) for text in ("one", "x" * 200, "two")]
    file.write_text("\n".join(lines))
    assert [text for _, text in read(file)] == ["one", "", "two"]
    plan = plan_split(text_corpus(file), 0.05, 1)
    assert (plan.report.documents, plan.report.too_long, plan.report.empty) == (2, 1, 0)


def test_another_field_of_jsonl_is_named_and_a_missing_text_is_an_empty_document(tmp_path: Path):
    file = tmp_path / "some.jsonl"
    file.write_text('{"id": 1, "body": "one"}\n{"body": null}\n{"body": ""}\n')
    corpus = read_corpus(str(file), "body")
    assert isinstance(corpus, TextCorpus)
    assert [document.text for document in corpus.documents()] == ["one", "", ""]


def test_of_a_folder_with_records_only_these_are_read(tmp_path: Path):
    (tmp_path / "README.md").write_text("about the data set")
    (tmp_path / "info.json").write_text("{}")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}')
    with gzip.open(tmp_path / "b.json.gz", "wt") as file:
        file.write('{"text": "two"}\n{"text": "three"}\n')
    corpus = text_corpus(tmp_path)
    assert [document.text for document in corpus.documents()] == ["one", "two", "three"]
    assert "without 2 file(s)" in corpus.description


PICTURE = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"


def test_pictures_among_the_text_are_left_out_and_counted(tmp_path: Path):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "b.png").write_bytes(PICTURE)
    (tmp_path / "z.gz").write_bytes(gzip.compress(PICTURE))
    corpus = text_corpus(tmp_path)
    assert [document.text for document in corpus.documents()] == ["fine"]
    assert corpus.description.endswith(
        "(without 2 file(s) that are not text, such as images/b.png)"
    )


def test_a_picture_alone_is_refused_by_name(tmp_path: Path):
    picture = tmp_path / "b.png"
    picture.write_bytes(PICTURE)
    with pytest.raises(DataError, match=r"b\.png is not text: byte 8 is NUL"):
        read(picture)
    with pytest.raises(DataError, match=r"holds no text, but b\.png; put"):
        read_corpus(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"x" * 8000 + b"\0", "byte 8000 is NUL"),  # too far on for a picture
        ("größer".encode("latin-1"), "near byte 0 it is not UTF-8"),
        ("groß".encode()[:-1], "it is not UTF-8"),
    ],
)
def test_what_is_not_text_is_refused_by_name(tmp_path: Path, content: bytes, reason: str):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.txt is not text: .*{reason}"):
        read(tmp_path)


def test_what_is_not_there_or_empty_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="no training data at"):
        read_corpus(str(tmp_path / "gone"))
    with pytest.raises(DataError, match="holds no file"):
        read_corpus(str(tmp_path))
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(DataError, match="holds no text"):
        plan_split(text_corpus(tmp_path), 0.05, 1)


def test_a_damaged_description_of_shards_is_refused(tmp_path: Path):
    (tmp_path / "shards.json").write_text('{"format": 1, "source": 3}')
    with pytest.raises(DataError, match=r"shards\.json does not describe shards"):
        read_corpus(str(tmp_path))


@given(st.text(st.sampled_from("ab\nü€"), max_size=200), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_a_long_document_in_pieces_is_the_same_text(text: str, size: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "PIECE_CHARACTERS", size)
        pieces = list(corpus_module._in_pieces(iter([text[:70], text[70:]])))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= size for piece in pieces)


def test_a_folder_inside_that_may_not_be_read_is_named(tmp_path: Path):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert read(tmp_path) == [("a.txt", "fine")]

    def refuse(folder, onerror):
        onerror(PermissionError(13, "Permission denied", f"{folder}/locked"))
        return iter(())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module.os, "walk", refuse)
        with pytest.raises(DataError, match="locked \\(Permission denied\\)"):
            read_corpus(str(tmp_path))


def test_a_long_file_comes_in_pieces_that_end_with_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(corpus_module, "PIECE_CHARACTERS", 100)
    monkeypatch.setattr(compressed_files, "BLOCK_BYTES", 7)
    file = tmp_path / "a.txt"
    text = "".join(f"line {n} größer €\n" for n in range(40))
    file.write_text(text)
    documents = list(text_corpus(file).documents())
    assert "".join(document.text for document in documents) == text
    assert all(document.text.endswith("\n") for document in documents)
    assert [document.continues for document in documents] == [False] + [True] * (len(documents) - 1)
    assert len({document.name for document in documents}) == len(documents) > 5


def test_a_folder_with_a_description_of_shards_is_ready(tmp_path: Path):
    shard = {"tokens": 5, "merkle_root": "0" * 64}
    index = {
        "format": 1, "source": "there", "column": "text", "tokenizer": "bytes",
        "heldout_share": 0.05, "vocabulary_size": 256,
        "report": {"documents": 2, "text_bytes": 8, "duplicates": 0, "empty": 0, "too_long": 0},
        "data": {
            "token_bytes": 1, "tokenizer": "bytes", "unigram_entropy_nats": 1.0,
            "shards": [
                {"name": "train-00000.tokens", "split": "train", **shard},
                {"name": "heldout-00000.tokens", "split": "heldout", **shard},
            ],
        },
    }  # fmt: skip
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shards.json").write_text(json.dumps(index))
    for named in (tmp_path / "data", tmp_path):
        ready = read_corpus(str(named))
        assert isinstance(ready, ReadyShards)
        assert ready.folder == tmp_path / "data"
        assert [info.tokens for info in ready.index.data.shards] == [5, 5]
