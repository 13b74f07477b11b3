from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_shared.base.errors import ConfigurationError, DataError
from swarm_shared.data.tokenizer import (
    END_OF_TEXT_TOKEN,
    BytesTokenizer,
    JsonTokenizer,
    load_tokenizer,
    train_bpe,
)

TEXTS = [f"def function_{n}(value):\n    return value + {n}  # größer\n" for n in range(50)]
BPE = train_bpe(TEXTS, 320)

any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@given(any_text)
@settings(max_examples=200, deadline=None)
def test_bytes_give_the_text_back_and_never_the_mark(text: str):
    ids = BytesTokenizer().encode(text)
    assert BytesTokenizer().decode(ids) == text
    assert BytesTokenizer.end_of_text not in ids
    assert ids.tolist() == list(text.encode("utf-8"))


@given(any_text)
@settings(max_examples=200, deadline=None)
def test_bpe_gives_any_text_back_and_never_the_mark(text: str):
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text
    assert BPE.end_of_text not in ids
    assert np.all(ids < BPE.vocabulary_size)


def test_a_batch_is_what_its_texts_give_one_by_one():
    for tokenizer in (BPE, BytesTokenizer()):
        batch = tokenizer.encode_batch(TEXTS)
        for ids, text in zip(batch, TEXTS, strict=True):
            np.testing.assert_array_equal(ids, tokenizer.encode(text))


def test_a_document_that_spells_the_mark_out_does_not_end_there():
    text = f"before{END_OF_TEXT_TOKEN}after"
    for tokenizer in (BPE, JsonTokenizer(BPE.content, "here")):
        ids = tokenizer.encode(text)
        assert tokenizer.end_of_text not in ids
        assert tokenizer.decode(ids) == text


def test_bpe_learns_merges_of_its_text():
    assert BPE.vocabulary_size == 320
    assert len(BPE.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_a_text_too_small_for_the_vocabulary_yields_fewer_ids():
    small = train_bpe(["aa bb"], 4096)
    assert 257 <= small.vocabulary_size < 300
    assert small.decode(small.encode("zebra ü")) == "zebra ü"


def test_training_gives_the_same_bytes_in_another_process_and_with_one_thread():
    program = (
        "import hashlib\n"
        "from swarm_shared.data.tokenizer import train_bpe\n"
        f"print(hashlib.sha256(train_bpe({TEXTS!r}, 320).content).hexdigest())"
    )
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "77"}
    other = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert other.stdout.strip() == hashlib.sha256(BPE.content).hexdigest()


def test_a_saved_tokenizer_is_the_same_one_when_loaded(tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    digest = BPE.save(path)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    loaded = load_tokenizer("bpe", path, digest)
    assert loaded.vocabulary_size == BPE.vocabulary_size
    for text in TEXTS:
        np.testing.assert_array_equal(loaded.encode(text), BPE.encode(text))


def test_marks_and_ids_of_no_token_are_left_out_of_the_text():
    for tokenizer in (BPE, BytesTokenizer()):
        end = tokenizer.end_of_text
        ids = [end, *tokenizer.encode("a b").tolist(), end, 999_999, -1]
        assert tokenizer.decode(ids) == "a b"


def test_half_a_character_is_shown_as_damaged_and_not_refused():
    assert BytesTokenizer().decode(list("ü".encode())[:1]) == "\ufffd"


def test_a_nul_character_is_refused_by_bytes():
    with pytest.raises(DataError, match="NUL"):
        BytesTokenizer().encode("a\0b")


def test_a_vocabulary_without_room_for_every_byte_is_refused():
    assert train_bpe(TEXTS, 257).vocabulary_size == 257
    with pytest.raises(ConfigurationError, match="at least 257"):
        train_bpe(TEXTS, 256)


def test_a_changed_tokenizer_file_is_refused(tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    digest = BPE.save(path)
    path.write_bytes(path.read_bytes().replace(b'"return', b'"reTurn') + b"\n")
    with pytest.raises(DataError, match="hash differs"):
        load_tokenizer("bpe", path, digest)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2", b"\xff\xfe"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer("bpe", path)


def a_tokenizer_with(**parts: object) -> bytes:
    """A tokenizer.json of three words, in which other parts of the package are named."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "</s>": 2}, "unk_token": "a"}
    end = {"id": 2, "content": "</s>", "special": True, "single_word": False, "lstrip": False,
           "rstrip": False, "normalized": False}  # fmt: skip
    return json.dumps({"version": "1.0", "added_tokens": [end], "model": model, **parts}).encode()


def test_a_file_on_which_the_package_fails_an_assertion_is_refused():
    damaged = {"type": "Precompiled", "precompiled_charsmap": ""}
    with pytest.raises(DataError, match="here is not a tokenizer"):
        JsonTokenizer(a_tokenizer_with(normalizer=damaged), "here")


def test_a_tokenizer_that_fails_an_assertion_at_a_text_is_refused():
    endless = {"type": "FixedLength", "length": 0}
    tokenizer = JsonTokenizer(a_tokenizer_with(pre_tokenizer=endless), "here")
    with pytest.raises(DataError, match=r"cannot encode it \(.*\); use another one"):
        tokenizer.encode("a b")


def test_a_tokenizer_that_fails_an_assertion_at_ids_is_refused():
    longer = {"type": "Strip", "content": "a", "start": 0, "stop": 100}
    tokenizer = JsonTokenizer(a_tokenizer_with(decoder=longer), "here")
    with pytest.raises(DataError, match="cannot decode what it encodes"):
        tokenizer.decode([0, 1])


def test_a_missing_tokenizer_file_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"gone\.json"):
        load_tokenizer("bpe", tmp_path / "gone.json")
