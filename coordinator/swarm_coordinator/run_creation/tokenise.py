"""A stream of documents to a stream of tokens, by one process or several.

Memory holds a few batches of documents for each process, however many there are. Batches come back
in the order in which they went out, so that the tokens are the same for any number of processes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process

import numpy as np

from swarm_coordinator.run_creation.corpus import TextDocument
from swarm_shared.base.errors import CapacityError, DataError
from swarm_shared.base.text import progress_text, size_text
from swarm_shared.data.shards import Tokens
from swarm_shared.data.tokenizer import BytesTokenizer, JsonTokenizer, Tokenizer

BATCH_CHARACTERS = 2 * 1024 * 1024
BATCHES_PER_PROCESS = 2
"""One is encoded while the next one waits."""
REPORT_SECONDS = 10.0

_BYTES_PER_PROCESS = 64 * 1024 * 1024
"""Text for which a process is worth starting: starting takes half a second of computing, encoding
this half a minute (byte pairs, 2 MB/s a core)."""


def token_stream(
    tokenizer: Tokenizer, documents: Iterator[TextDocument], processes: int
) -> Generator[Tokens, None, None]:
    """Yield the ids of every document, each preceded by the separator, in the documents' order."""
    # Handing text over takes longer than encoding it as bytes.
    if processes == 1 or isinstance(tokenizer, BytesTokenizer):
        for batch in _batches(documents):
            yield _encode(tokenizer, batch)
        return
    executor = ProcessPoolExecutor(
        processes, get_context("spawn"), _start_process, (tokenizer.content,)
    )
    pending: deque[Future[Tokens]] = deque()
    try:
        for batch in _batches(documents):
            pending.append(executor.submit(_encode_in_process, batch))
            if len(pending) == BATCHES_PER_PROCESS * processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise CapacityError(
            "a process that tokenised was killed, most likely because memory ran out; use fewer "
            "(init --processes)"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def process_count(text_bytes: int, asked: int | None) -> int:
    """Return how many processes tokenise: the number asked for, or what the text is worth."""
    return asked or max(1, min(os.cpu_count() or 1, text_bytes // _BYTES_PER_PROCESS))


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


# ---------------------------------------------------------------- in a process of the pool

_tokenizer: JsonTokenizer | None = None


def _start_process(content: bytes) -> None:
    global _tokenizer
    # Ctrl-C reaches every process of the terminal; the one that started this ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = JsonTokenizer(content, "the run's tokenizer")


def _end_with_parent() -> None:
    """End this process when the one that started it is killed: it would wait for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_process(batch: list[TextDocument]) -> Tokens:
    assert _tokenizer is not None
    return _encode(_tokenizer, batch)
