"""The organiser's own tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from swarm_coordinator.run_creation.tokenizer_files import organisers_tokenizer
from swarm_shared.base.errors import DataError
from swarm_shared.data.tokenizer import END_OF_TEXT_TOKENS, JsonTokenizer

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"


def vocabulary(folder: Path, *lines: str, end: str = "\n") -> JsonTokenizer:
    path = folder / "vocabulary.txt"
    path.write_bytes("".join(line + end for line in lines).encode())
    return organisers_tokenizer(path)


def test_the_id_of_a_token_is_the_number_of_its_line(tmp_path: Path):
    tokenizer = vocabulary(tmp_path, "<eos>", *AMINO_ACIDS)
    assert tokenizer.encode("MACW").tolist() == [11, 1, 2, 19]
    assert tokenizer.decode([11, 1, 2, 19]) == "MACW"
    assert (tokenizer.end_of_text, tokenizer.vocabulary_size) == (0, 21)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_vocabulary_without_an_end_of_text_gets_one_after_its_last_line(tmp_path: Path, end: str):
    tokenizer = vocabulary(tmp_path, *AMINO_ACIDS, end=end)
    assert (tokenizer.end_of_text, tokenizer.vocabulary_size) == (20, 21)
    tokenizer.save(tmp_path / "tokenizer.json")
    again = organisers_tokenizer(tmp_path / "tokenizer.json")
    assert (again.end_of_text, again.content) == (20, tokenizer.content)


def test_newline_and_tab_have_lines_of_their_own(tmp_path: Path):
    tokenizer = vocabulary(tmp_path, "\\n", "\\t", " ", "a", "\\")
    assert tokenizer.encode("a\n\t \\").tolist() == [3, 0, 1, 2, 4]


def test_an_unknown_character_is_named_with_its_place(tmp_path: Path):
    tokenizer = vocabulary(tmp_path, *AMINO_ACIDS)
    with pytest.raises(DataError, match=r"character 4 is 'é' \(U\+00E9\), for which .* no token"):
        tokenizer.encode_batch(["MAC", "MAAéZ"])


def test_with_a_line_for_the_unknown_it_stands_for_each_character(tmp_path: Path):
    tokenizer = vocabulary(tmp_path, "<unk>", "<eos>", *AMINO_ACIDS)
    assert tokenizer.encode("MéZA<eos>").tolist() == [12, 0, 0, 2, 0, 0, 0, 0, 0]


tokens = st.text(st.sampled_from("ab\n é^]-\\&"), min_size=1, max_size=5).filter(
    lambda token: token not in ("\\n", "\\t") and "\n" not in token
)


@given(st.lists(tokens, min_size=1, max_size=12, unique=True), st.data())
@settings(max_examples=200, deadline=None)
def test_the_longest_token_is_taken_at_each_place(
    tmp_path_factory: pytest.TempPathFactory, found: list[str], data: st.DataObject
):
    text = "".join(data.draw(st.lists(st.sampled_from(found), max_size=8)))
    expected, place = [], 0
    while place < len(text):
        here = [token for token in found if text.startswith(token, place)]
        if not here:
            return  # a longer token has taken the beginning of another
        expected.append(found.index(max(here, key=len)))
        place += len(max(here, key=len))
    tokenizer = vocabulary(tmp_path_factory.mktemp("vocabulary"), *found)
    assert tokenizer.encode(text).tolist() == expected
    assert tokenizer.decode(expected) == text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"A\n\nC\n", "line 2 of the vocabulary .* is empty"),
        (b"", "line 1 of the vocabulary .* is empty"),
        (b"A\nC\nA\n", "line 3 of the vocabulary .* repeats 'A' of line 1"),
        (b"A\n" + b"C" * 101, "line 2 of the vocabulary .* is longer than 100 characters"),
        (b"A\n\xff\n", r"is not UTF-8 \(byte 2\)"),
    ],
)
def test_a_vocabulary_that_is_none_is_refused(tmp_path: Path, content: bytes, reason: str):
    path = tmp_path / "vocabulary.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason):
        organisers_tokenizer(path)


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path):
    for name in ("gone.json", "bep"):
        with pytest.raises(DataError, match=f"cannot read the tokenizer .*{name}"):
            organisers_tokenizer(tmp_path / name)


# ---------------------------------------------------------------- tokenizer.json


def words(*special: str) -> Tokenizer:
    found = ["one", "two", "[UNK]", *special]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(found)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["[UNK]", *special])
    return backend


def saved(folder: Path, backend: Tokenizer) -> JsonTokenizer:
    path = folder / "tokenizer.json"
    path.write_text(backend.to_str())
    return organisers_tokenizer(path)


@pytest.mark.parametrize("token", END_OF_TEXT_TOKENS)
def test_a_tokenizers_own_end_of_text_separates_documents(tmp_path: Path, token: str):
    tokenizer = saved(tmp_path, words("<pad>", token))
    assert (tokenizer.end_of_text_token, tokenizer.end_of_text) == (token, 4)
    assert tokenizer.content == (tmp_path / "tokenizer.json").read_bytes()
    assert tokenizer.encode("two one what").tolist() == [1, 0, 2]


def test_a_tokenizer_without_an_end_of_text_gets_one_more_id(tmp_path: Path):
    tokenizer = saved(tmp_path, words())
    assert (tokenizer.end_of_text_token, tokenizer.end_of_text) == (END_OF_TEXT_TOKENS[0], 3)
    assert tokenizer.vocabulary_size == 4
    again = JsonTokenizer(tokenizer.content, "here")
    assert (again.end_of_text, again.content) == (3, tokenizer.content)


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path):
    backend = words("</s>")
    backend.enable_truncation(3)
    backend.enable_padding(length=6)
    tokenizer = saved(tmp_path, backend)
    batch = tokenizer.encode_batch(["one", "one two one two one two one two"])
    assert [ids.tolist() for ids in batch] == [[0], [0, 1] * 4]


def test_ids_with_gaps_need_a_vocabulary_for_the_largest(tmp_path: Path):
    backend = Tokenizer(models.WordLevel({"one": 0, "</s>": 1, "two": 9}))
    with pytest.raises(DataError, match="has no token that ends a document, and its ids have gaps"):
        saved(tmp_path, Tokenizer(models.WordLevel({"one": 1, "two": 2})))
    backend.add_special_tokens(["</s>"])
    assert saved(tmp_path, backend).vocabulary_size == 10
