from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_coordinator.run_creation import corpus as corpus_module
from swarm_coordinator.run_creation.corpus import (
    ReadyShards,
    TextCorpus,
    TextDocument,
    plan_split,
    read_corpus,
    sampled,
    split_documents,
)
from swarm_shared.base.errors import DataError


def text_corpus(source: Path | str) -> TextCorpus:
    corpus = read_corpus(str(source))
    assert isinstance(corpus, TextCorpus)
    return corpus


def read(source: Path | str) -> list[tuple[str, str]]:
    return [(document.name, document.text) for document in text_corpus(source).documents()]


def of_texts(texts: dict[str, str]) -> TextCorpus:
    documents = [TextDocument(name, text) for name, text in texts.items()]
    return TextCorpus("the test's text", lambda: iter(documents))


def both(corpus: TextCorpus, share: float = 0.05, least: int = 1) -> tuple[list[str], list[str]]:
    plan = plan_split(corpus, share, least)
    train = [document.text for document in split_documents(corpus, plan, "train")]
    heldout = [document.text for document in split_documents(corpus, plan, "heldout")]
    return train, heldout


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
        ('{"txt": "no"}', 'a string in its field "text"'),
        ('["text"]', 'a string in its field "text"'),
        ('{"text": 7}', 'a string in its field "text"'),
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


def test_a_line_longer_than_memory_should_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(corpus_module, "MAX_LINE_BYTES", 100)
    file = tmp_path / "some.jsonl"
    file.write_text(json.dumps({"text": "x" * 200}))
    with pytest.raises(DataError, match="line 1: it is longer than 100 bytes"):
        read(file)


def test_a_picture_among_the_text_is_refused_by_name(tmp_path: Path):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    with pytest.raises(DataError, match=r"b\.png is not text: byte 8 is NUL"):
        read(tmp_path)


def test_text_in_another_encoding_is_refused_by_name(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes("größer".encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.txt is not text: near byte 0 it is not UTF-8"):
        read(tmp_path)


def test_a_character_cut_off_at_the_end_is_not_text(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes("groß".encode()[:-1])
    with pytest.raises(DataError, match=r"a\.txt is not text"):
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
    monkeypatch.setattr(corpus_module, "_READ_BYTES", 7)
    file = tmp_path / "a.txt"
    text = "".join(f"line {n} größer €\n" for n in range(40))
    file.write_text(text)
    documents = list(text_corpus(file).documents())
    assert "".join(document.text for document in documents) == text
    assert all(document.text.endswith("\n") for document in documents)
    assert [document.continues for document in documents] == [False] + [True] * (len(documents) - 1)
    assert len({document.name for document in documents}) == len(documents) > 5


def test_about_a_twentieth_of_many_documents_is_held_out_whole():
    texts = {f"{n}.txt": f"document {n} " * (1 + n % 7) for n in range(1000)}
    train, heldout = both(of_texts(texts))
    assert sorted(train + heldout) == sorted(texts.values())
    share = sum(map(len, heldout)) / sum(map(len, texts.values()))
    assert 0.04 < share < 0.06


def test_the_split_depends_on_names_and_not_on_order():
    texts = {f"{n}.txt": f"document {n} " * 20 for n in range(100)}
    backwards = dict(reversed(texts.items()))
    assert sorted(both(of_texts(texts))[1]) == sorted(both(of_texts(backwards))[1])


def test_a_repeated_document_is_used_once_so_that_none_is_on_both_sides():
    texts = {f"{n}.txt": f"document {n % 50} " * 20 for n in range(500)}
    train, heldout = both(of_texts(texts))
    assert len(train) + len(heldout) == 50
    assert set(train).isdisjoint(heldout)
    assert train
    assert heldout


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=30), st.sampled_from([0.01, 0.05, 0.3]))
@settings(max_examples=200, deadline=None)
def test_both_sides_are_long_enough_and_share_nothing_whatever_the_lengths(
    lengths: list[int], share: float
):
    texts = {f"{n}": f"{n}:" + "x" * length for n, length in enumerate(lengths)}
    least = 100
    if sum(map(len, texts.values())) < 4 * least or max(map(len, texts.values())) < 2 * least:
        return
    train, heldout = both(of_texts(texts), share, least)
    assert sum(map(len, train)) + sum(map(len, heldout)) == sum(map(len, texts.values()))
    assert sum(map(len, train)) >= least
    assert sum(map(len, heldout)) >= least
    assert sum(map(len, heldout)) <= sum(map(len, train))


def test_the_end_of_a_single_document_is_held_out_after_a_line():
    text = "".join(f"line {n} ü\n" for n in range(1000))
    train, heldout = both(of_texts({"a": text}))
    assert train[0] + heldout[0] == text
    assert train[0].endswith("\n")
    assert 0.04 < len(heldout[0]) / len(text) < 0.08


def test_a_single_document_without_lines_is_never_cut_inside_a_character():
    for length in range(100, 110):
        text = "€" * length
        train, heldout = both(of_texts({"a": text}), least=20)
        assert train[0] + heldout[0] == text
        assert train[0]
        assert heldout[0]


def test_a_corpus_that_changes_while_it_is_read_is_noticed():
    texts = {"a": "x" * 100, "b": "y" * 100}
    corpus = TextCorpus("it", lambda: iter([TextDocument(n, t) for n, t in texts.items()]))
    plan = plan_split(corpus, 0.05, 1)
    texts["c"] = "z"
    with pytest.raises(DataError, match="changed while it was read"):
        list(split_documents(corpus, plan, "train"))
    del texts["c"], texts["b"]
    with pytest.raises(DataError, match="changed while it was read"):
        list(split_documents(corpus, plan, "train"))


def test_a_sample_is_about_its_share_and_always_the_same():
    documents = [TextDocument(str(n), "") for n in range(2000)]
    names = [document.name for document in sampled(iter(documents), 0.3)]
    assert names == [document.name for document in sampled(iter(documents), 0.3)]
    assert 500 < len(names) < 700
    assert len(list(sampled(iter(documents), 2.5))) == 2000


def test_a_folder_with_a_description_of_shards_is_ready(tmp_path: Path):
    shard = {"tokens": 5, "merkle_root": "0" * 64}
    index = {
        "format": 1, "source": "there", "heldout_share": 0.05, "vocabulary_size": 256,
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
