"""The training text: reading its sources, and the split into training and held-out documents.

Owns reading (the Python standard library's source, text files, folders, JSONL, ready shards), the
refusal of what is not text, and dropping exact duplicates. Does not tokenise and does not write.
Text is streamed: documents longer than a mebibyte are cut into pieces, and the corpus is read once
to plan the split and once per use, so that it may be larger than memory (the plan keeps about 100
bytes per document).
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import sysconfig
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swarm_coordinator.configuration.run_settings import PYTHON_STDLIB
from swarm_coordinator.run_dir.shard_index import SHARD_INDEX, ShardIndex, read_shard_index
from swarm_shared.base.errors import DataError
from swarm_shared.data.shards import Split

PIECE_CHARACTERS = 1024 * 1024
MAX_LINE_BYTES = 256 * 1024 * 1024
_READ_BYTES = 1024 * 1024
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)


@dataclass(frozen=True, slots=True)
class TextDocument:
    """One document of the corpus, or a piece of a long one."""

    name: str
    """Origin of the text relative to the source; the same on every machine."""
    text: str
    continues: bool = False
    """Whether this is a later piece of a long document."""


@dataclass(frozen=True, slots=True)
class TextCorpus:
    """Text that can be read any number of times, always in the same order."""

    description: str
    documents: Callable[[], Iterator[TextDocument]]


@dataclass(frozen=True, slots=True)
class ReadyShards:
    """Existing shards in `folder`, described by `index`."""

    folder: Path
    index: ShardIndex


def read_corpus(source: str) -> TextCorpus | ReadyShards:
    """Return what `source` names: `python-stdlib`, or the path of a file or folder."""
    if source == PYTHON_STDLIB:
        return _python_stdlib()
    path = Path(source).expanduser()
    if not path.exists():
        raise DataError(
            f"there is no training data at {path}; give a text file, a folder of text files, a "
            f".jsonl file, a folder of ready shards, or {PYTHON_STDLIB}"
        )
    if path.is_file():
        return TextCorpus(str(path), lambda: _file_documents(path, path.name))
    # A run folder keeps its shards in `data`.
    for folder in (path, path / "data"):
        if (folder / SHARD_INDEX).exists():
            return ReadyShards(folder, read_shard_index(folder))
    files = _text_files(path)
    if not files:
        raise DataError(f"the folder {path} holds no file; put text files there")
    return TextCorpus(str(path), lambda: _folder_documents(path, files))


def _python_stdlib() -> TextCorpus:
    folder = Path(sysconfig.get_path("stdlib"))
    try:
        files = [file for file in _text_files(folder, _NOT_LIBRARY) if file.suffix == ".py"]
    except DataError:  # an embedded Python, or a library in a zip file
        files = []
    if not files:
        raise DataError(
            f"this Python has no source of its standard library at {folder}; "
            "give the path of some text instead"
        )
    return TextCorpus("the Python standard library", lambda: _folder_documents(folder, files))


def _text_files(folder: Path, left_out: frozenset[str] = frozenset()) -> list[Path]:
    """Return all files below the folder except hidden ones, sorted by path."""
    files: list[Path] = []

    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename or folder), error)

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name[0] != "." and name not in left_out]
        paths = (Path(parent, name) for name in names if name[0] != ".")
        files += [path for path in paths if path.is_file()]
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def _folder_documents(folder: Path, files: list[Path]) -> Iterator[TextDocument]:
    for file in files:
        yield from _file_documents(file, file.relative_to(folder).as_posix())


def _file_documents(path: Path, name: str) -> Iterator[TextDocument]:
    if path.suffix == ".jsonl":
        yield from _jsonl_documents(path, name)
        return
    pieces = _in_pieces(_decoded(path))
    for number, text in enumerate(pieces):
        yield _piece(name, number, text)


def _decoded(path: Path) -> Iterator[str]:
    """Yield the text of a UTF-8 file in blocks; DataError for anything else."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    position = 0
    try:
        with path.open("rb") as file:
            while True:
                block = file.read(_READ_BYTES)
                if (nul := block.find(b"\0")) >= 0:
                    raise _not_text(path, f"byte {position + nul} is NUL")
                text = decoder.decode(block, final=not block)
                if text:
                    yield text
                if not block:
                    return
                position += len(block)
    except UnicodeDecodeError as error:
        raise _not_text(path, f"near byte {position} it is not UTF-8") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _in_pieces(blocks: Iterator[str]) -> Iterator[str]:
    """Cut the text into pieces of about PIECE_CHARACTERS, after the end of a line if possible."""
    held = ""
    for block in blocks:
        held, start = held + block, 0
        while len(held) - start > PIECE_CHARACTERS:
            end = start + PIECE_CHARACTERS
            cut = held.rfind("\n", start, end) + 1 or end
            yield held[start:cut]
            start = cut
        held = held[start:]
    if held:
        yield held


def _piece(name: str, number: int, text: str) -> TextDocument:
    return TextDocument(f"{name}#{number}" if number else name, text, number > 0)


def _jsonl_documents(path: Path, name: str) -> Iterator[TextDocument]:
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                if line.strip():
                    pieces = _in_pieces(iter([_jsonl_text(path, number, line)]))
                    for part, text in enumerate(pieces):
                        yield _piece(f"{name}:{number}", part, text)
    except OSError as error:
        raise _unreadable(path, error) from error


def _jsonl_text(path: Path, number: int, line: bytes) -> str:
    def damaged(reason: str) -> DataError:
        return DataError(f"{path}, line {number}: {reason}; correct or remove that line")

    if len(line) >= MAX_LINE_BYTES:
        raise damaged(f"it is longer than {MAX_LINE_BYTES} bytes")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise damaged(f"it is not JSON ({error})") from error
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise damaged('it is not an object with a string in its field "text"')
    if "\0" in text:
        raise damaged("its text has a NUL character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise damaged("its text has half of a surrogate pair") from error
    return text


def _not_text(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path} is not text: {reason}; convert it to UTF-8 text or take it out of the data"
    )


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"cannot read {path} ({error.strerror}); check its permissions")


_DROPPED, _TRAIN, _HELDOUT, _TAIL = range(4)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The split: documents for training, held-out documents, and dropped duplicates."""

    assignments: bytes
    """One byte for each document, in the corpus's order."""
    tail_bytes: int
    """Held-out bytes at the end of the one document with assignment _TAIL."""
    train_bytes: int
    heldout_bytes: int
    duplicates: int


def plan_split(corpus: TextCorpus, heldout_share: float, least_bytes: int) -> SplitPlan:
    """Hold out `heldout_share` of the text in whole documents, selected by a hash of their names.

    Where no selection of whole documents comes near the share and leaves `least_bytes` on both
    sides, the end of the longest document is held out instead.
    """
    assignments, sizes, keys = bytearray(), array("Q"), array("Q")
    seen: set[bytes] = set()
    for document in corpus.documents():
        content = document.text.encode("utf-8")
        digest = hashlib.blake2b(content, digest_size=16).digest()
        kept = digest not in seen and bool(content.strip())
        seen.add(digest)
        assignments.append(_TRAIN if kept else _DROPPED)
        sizes.append(len(content) if kept else 0)
        keys.append(_key(document.name))
    total_bytes = sum(sizes)
    if total_bytes == 0:
        raise DataError(f"{corpus.description} holds no text; add some")
    heldout = _choose_whole(assignments, sizes, keys, heldout_share, least_bytes)
    tail_bytes = 0
    for ordinal in heldout:
        assignments[ordinal] = _HELDOUT
    if not heldout:
        longest = max(range(len(sizes)), key=lambda ordinal: sizes[ordinal])
        assignments[longest] = _TAIL
        tail_bytes = max(round(heldout_share * sizes[longest]), least_bytes)
    heldout_bytes = tail_bytes + sum(sizes[ordinal] for ordinal in heldout)
    duplicates = sum(assignment == _DROPPED for assignment in assignments)
    return SplitPlan(
        bytes(assignments),
        tail_bytes,
        max(0, total_bytes - heldout_bytes),
        heldout_bytes,
        duplicates,
    )


def _choose_whole(
    assignments: bytearray, sizes: array[int], keys: array[int], share: float, least_bytes: int
) -> list[int]:
    """Select ordinals by their keys until the share is reached; [] if that is impossible."""
    order = np.argsort(np.frombuffer(keys, dtype=np.uint64), kind="stable").tolist()
    total = sum(sizes)
    target = max(share * total, least_bytes)
    for largest in (2 * target, max(2 * target, total / 4)):
        chosen, held = [], 0
        for ordinal in order:
            if assignments[ordinal] == _TRAIN and held + sizes[ordinal] <= largest:
                chosen.append(ordinal)
                held += sizes[ordinal]
                if held >= target:
                    break
        if held >= target / 2 and held >= least_bytes and total - held >= max(held, least_bytes):
            return chosen
    return []


def split_documents(corpus: TextCorpus, plan: SplitPlan, split: Split) -> Iterator[TextDocument]:
    """Yield the documents of one split, in the corpus's order."""
    wanted = _TRAIN if split == "train" else _HELDOUT
    ordinal = -1
    for ordinal, document in enumerate(corpus.documents()):
        if ordinal >= len(plan.assignments):
            break
        assignment = plan.assignments[ordinal]
        if assignment == _TAIL:
            yield _part(document, plan.tail_bytes, split)
        elif assignment == wanted:
            yield document
    if ordinal + 1 != len(plan.assignments):
        raise DataError(
            f"{corpus.description} changed while it was read; do not modify it and start again"
        )


def sampled(documents: Iterator[TextDocument], share: float) -> Iterator[TextDocument]:
    """Yield about `share` of the documents, always the same ones."""
    for document in documents:
        if share >= 1 or _key("sample " + document.name) < share * 2**64:
            yield document


def _part(document: TextDocument, tail_bytes: int, split: Split) -> TextDocument:
    content = document.text.encode("utf-8")
    cut = max(0, len(content) - tail_bytes)
    # After a line if one ends nearby, and never inside a character.
    cut = content.rfind(b"\n", max(0, cut - tail_bytes // 4), cut) + 1 or cut
    while 0 < cut < len(content) and content[cut] & 0xC0 == 0x80:
        cut -= 1
    part = content[:cut] if split == "train" else content[cut:]
    return TextDocument(f"{document.name}/{split}", part.decode("utf-8"))


def _key(name: str) -> int:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
