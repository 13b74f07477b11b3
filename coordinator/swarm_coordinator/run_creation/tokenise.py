"""A stream of documents to a stream of tokens.

Memory holds a batch of documents, however many there are. The texts of a batch are encoded side by
side by the threads of the `tokenizers` package: one per core, or RAYON_NUM_THREADS.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from swarm_coordinator.run_creation.corpus import TextDocument
from swarm_shared.base.errors import DataError
from swarm_shared.base.text import progress_text, size_text
from swarm_shared.data.shards import Tokens
from swarm_shared.data.tokenizer import Tokenizer

BATCH_CHARACTERS = 8 * 1024 * 1024
"""A document's pieces have a mebibyte at most, so that these are enough for eight threads."""
REPORT_SECONDS = 10.0


def token_stream(tokenizer: Tokenizer, documents: Iterator[TextDocument]) -> Iterator[Tokens]:
    """Yield the ids of every document, each preceded by the separator, in the documents' order."""
    for batch in _batches(documents):
        yield _encode(tokenizer, batch)


def metered(
    documents: Iterator[TextDocument],
    progress: Callable[[str], None],
    done: str,
    total_bytes: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[TextDocument]:
    """Yield the documents and report every REPORT_SECONDS how many bytes of them are `done`."""
    began = reported = clock()
    done_bytes = 0
    for document in documents:
        yield document
        text = document.text
        done_bytes += len(text) if text.isascii() else len(text.encode("utf-8"))
        now = clock()
        if now - reported >= REPORT_SECONDS:
            reported = now
            rate = done_bytes / (now - began)
            of = progress_text(done_bytes, total_bytes, rate)
            progress(f"{done} {of if total_bytes else size_text(done_bytes)}")


def _batches(documents: Iterator[TextDocument]) -> Iterator[list[TextDocument]]:
    batch: list[TextDocument] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(tokenizer: Tokenizer, batch: Sequence[TextDocument]) -> Tokens:
    try:
        encoded = tokenizer.encode_batch([document.text for document in batch])
    except DataError:
        for document in batch:
            _name_the_fault(tokenizer, document)
        raise
    separator = np.array([tokenizer.end_of_text], dtype=np.uint32)
    pieces: list[Tokens] = []
    for document, ids in zip(batch, encoded, strict=True):
        pieces += [ids] if document.continues else [separator, ids]
    return np.concatenate(pieces)


def _name_the_fault(tokenizer: Tokenizer, document: TextDocument) -> None:
    try:
        tokenizer.encode(document.text)
    except DataError as error:
        raise DataError(f"{document.name}: {error}") from error
