"""The stream of tokens: in order, whatever the batches, and never held whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_coordinator.run_creation import tokenise
from swarm_coordinator.run_creation.corpus import TextDocument
from swarm_coordinator.run_creation.tokenise import metered, token_stream
from swarm_coordinator.run_creation.tokenizer_files import organisers_tokenizer
from swarm_shared.base.errors import DataError
from swarm_shared.data.shards import write_shards
from swarm_shared.data.tokenizer import BytesTokenizer, Tokenizer, train_bpe

BPE = train_bpe([f"word {number} of some text\n" for number in range(50)], 320)


def joined(tokenizer: Tokenizer, documents: list[TextDocument]) -> list[int]:
    return np.concatenate(list(token_stream(tokenizer, iter(documents)))).tolist()


texts = st.lists(
    st.tuples(st.text(st.sampled_from("ab ü€\n"), max_size=30), st.booleans()), min_size=1
)


@given(texts, st.integers(1, 60), st.integers(1, 50), st.sampled_from([BPE, BytesTokenizer()]))
@settings(max_examples=150, deadline=None)
def test_shards_hold_exactly_the_documents_tokens_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[tuple[str, bool]],
    batch: int,
    shard: int,
    tokenizer: Tokenizer,
):
    documents = [
        TextDocument(str(number), text, number > 0 and continues)
        for number, (text, continues) in enumerate(texts)
    ]
    expected: list[int] = []
    for document in documents:
        expected += [] if document.continues else [tokenizer.end_of_text]
        expected += tokenizer.encode(document.text).tolist()
    folder = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenise, "BATCH_CHARACTERS", batch)
        stream = token_stream(tokenizer, iter(documents))
        infos = write_shards(folder, "train", stream, 2, shard_tokens=shard)
    found = np.concatenate([np.fromfile(folder / info.name, "<u2") for info in infos])
    assert found.tolist() == expected
    assert [info.tokens for info in infos[:-1]] == [shard] * (len(infos) - 1)


def test_an_unknown_character_is_named_with_its_document(tmp_path: Path):
    path = tmp_path / "vocabulary.txt"
    path.write_text("A\nC\n")
    documents = [TextDocument("a:1", "AC"), TextDocument("a:2", "CAX")]
    with pytest.raises(DataError, match=r"^a:2: character 3 is 'X' \(U\+0058\)"):
        joined(organisers_tokenizer(path), documents)


def test_progress_is_reported_by_the_clock():
    ticks = iter(range(0, 1000, 4))
    lines: list[str] = []
    documents = [TextDocument(str(n), "ü" * 500) for n in range(6)]
    found = metered(iter(documents), lines.append, "read", 10_000, lambda: float(next(ticks)))
    assert list(found) == documents
    assert lines == [
        "read 3 kB of 10 kB (30 %), 250 B/s, 28 s left",
        "read 6 kB of 10 kB (60 %), 250 B/s, 16 s left",
    ]


class Text(str):
    """A text that counts itself while it is held by this process."""

    __slots__ = ()
    held = most_held = 0

    def __new__(cls, text: str) -> Text:
        cls.held += 1
        cls.most_held = max(cls.held, cls.most_held)
        return super().__new__(cls, text)

    def __del__(self) -> None:
        Text.held -= 1

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def held_while(consume: Callable[[Iterator[TextDocument]], None], number: int) -> int:
    """Return how many of `number` documents are held at most while they are consumed."""
    Text.held = Text.most_held = 0
    consume(TextDocument(str(n), Text("a word " * 10)) for n in range(number))
    assert Text.held == 0
    return Text.most_held


@pytest.mark.parametrize("tokenizer", [BPE, BytesTokenizer()], ids=["bpe", "bytes"])
def test_one_batch_is_held_of_any_number_of_documents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Tokenizer
):
    monkeypatch.setattr(tokenise, "BATCH_CHARACTERS", 10 * 70)

    def write(documents: Iterator[TextDocument]) -> None:
        write_shards(tmp_path, "train", token_stream(tokenizer, documents), 2)

    assert held_while(write, 1000) <= 2 * 10 + 1
