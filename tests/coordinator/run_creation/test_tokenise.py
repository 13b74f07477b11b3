"""The stream of tokens: in order, whatever the batches and processes, and never held whole."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_coordinator.run_creation import tokenise
from swarm_coordinator.run_creation.corpus import TextDocument
from swarm_coordinator.run_creation.tokenise import (
    BATCHES_PER_PROCESS,
    metered,
    process_count,
    token_stream,
)
from swarm_coordinator.run_creation.tokenizer_files import organisers_tokenizer
from swarm_shared.base.errors import CapacityError, DataError
from swarm_shared.data.shards import write_shards
from swarm_shared.data.tokenizer import BytesTokenizer, Tokenizer, train_bpe

BPE = train_bpe([f"word {number} of some text\n" for number in range(50)], 320)


def joined(tokenizer: Tokenizer, documents: list[TextDocument], processes: int = 1) -> list[int]:
    return np.concatenate(list(token_stream(tokenizer, iter(documents), processes))).tolist()


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
        stream = token_stream(tokenizer, iter(documents), 1)
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


def test_each_process_has_enough_to_do_unless_their_number_is_given():
    megabyte = 2**20
    assert process_count(0, None) == process_count(64 * megabyte, None) == 1
    assert process_count(10**15, None) == os.cpu_count()
    assert process_count(0, 7) == 7


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
        write_shards(tmp_path, "train", token_stream(tokenizer, documents, 1), 2)

    assert held_while(write, 1000) <= 2 * 10 + 1


# ---------------------------------------------------------------- several processes


@pytest.mark.process
def test_the_tokens_are_the_same_for_any_number_of_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenise, "BATCH_CHARACTERS", 300)
    # Of very different lengths, so that later batches are done before earlier ones.
    documents = [
        TextDocument(str(n), f"word {n} " * (3000 if n % 9 == 0 else n % 7), n % 5 == 4)
        for n in range(200)
    ]
    alone = joined(BPE, documents)
    assert alone.count(BPE.end_of_text) == 160
    for processes in (2, 3):
        assert joined(BPE, documents, processes) == alone


@pytest.mark.process
def test_a_few_batches_for_each_process_are_held(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenise, "BATCH_CHARACTERS", 10 * 70)

    def consume(documents: Iterator[TextDocument]) -> None:
        for _ in token_stream(BPE, documents, 2):
            pass

    # One batch more is being filled, and one was just handed over.
    assert held_while(consume, 2000) <= 10 * (2 * BATCHES_PER_PROCESS + 2)


@pytest.mark.process
def test_an_unknown_character_is_named_by_another_process(tmp_path: Path):
    path = tmp_path / "vocabulary.txt"
    path.write_text("A\nC\n")
    with pytest.raises(DataError, match=r"^a:1: character 3 is 'X'"):
        joined(organisers_tokenizer(path), [TextDocument("a:1", "CAX")], 2)


@pytest.mark.process
def test_a_killed_process_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenise, "BATCH_CHARACTERS", 1)

    def documents() -> Iterator[TextDocument]:
        yield TextDocument("a", "text")
        for process in multiprocessing.active_children():
            process.kill()
        for number in range(100):
            yield TextDocument(str(number), "text")

    with pytest.raises(CapacityError, match="memory ran out; use fewer"):
        for _ in token_stream(BPE, documents(), 2):
            pass


WAITING = """
import multiprocessing, sys
from swarm_coordinator.run_creation.corpus import TextDocument
from swarm_coordinator.run_creation.tokenise import token_stream
from swarm_shared.data.tokenizer import train_bpe

def documents():
    for number in range(4):
        yield TextDocument(str(number), "some text " * 300_000)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    sys.stdin.read()

if __name__ == "__main__":
    list(token_stream(train_bpe(["some text"], 300), documents(), 2))
"""


@pytest.mark.process
def test_processes_end_when_the_one_that_started_them_is_killed(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(WAITING)
    with subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout is not None
            workers = [psutil.Process(int(word)) for word in other.stdout.readline().split()]
        finally:
            other.kill()
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=60)
    for process in alive:
        process.kill()
    assert alive == []
