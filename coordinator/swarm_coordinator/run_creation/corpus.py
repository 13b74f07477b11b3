"""The training text: its sources, read as a stream of documents.

Owns reading (the Python standard library's source, text, JSON lines, the columns of tables, folders
of them, compressed or not; ready shards) and the refusal of what is not text. Does not choose
between documents (`run_creation.split`), tokenise or write. Text is streamed: documents longer than
a mebibyte are cut into pieces, and the corpus can be read any number of times, so that it may be
larger than memory.
"""

from __future__ import annotations

import codecs
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from swarm_coordinator.configuration.run_settings import PYTHON_STDLIB
from swarm_coordinator.model_hub.data_sets import ADDRESS_FORM
from swarm_coordinator.run_creation.compressed_files import read_blocks, unreadable
from swarm_coordinator.run_creation.tables import TABLE_SUFFIXES, column_texts
from swarm_coordinator.run_dir.shard_index import SHARD_INDEX, ShardIndex, read_shard_index
from swarm_shared.base.errors import DataError
from swarm_shared.host.user_folders import expanded

PIECE_CHARACTERS = 1024 * 1024
MAX_RECORD_BYTES = 256 * 1024 * 1024
"""Bytes of a JSON line, characters of a table's cell: they are held in memory whole. A longer one
is left out."""
BINARY_BYTES = 8000
"""A file with a NUL among its first bytes is no text; git has the same rule (xdiff-interface.c)."""
DEFAULT_COLUMN = "text"

_JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")
"""Compressed `.json` as well: what large corpora publish under that name are JSON lines."""
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
    too_long: bool = False
    """Whether the document is left out because it exceeds MAX_RECORD_BYTES; `text` is empty."""


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


Corpus = TextCorpus | ReadyShards


def read_corpus(source: str, column: str = DEFAULT_COLUMN) -> Corpus:
    """Return what `source` names: `python-stdlib`, or the path of a file or folder. `column` of
    tables and JSON lines has the text."""
    if source == PYTHON_STDLIB:
        return _python_stdlib()
    path = expanded(Path(source))
    if not path.exists():
        raise DataError(
            f"there is no training data at {path}; give a file or a folder of text, .jsonl, "
            f".parquet or .arrow, a folder of ready shards, {ADDRESS_FORM}, or {PYTHON_STDLIB}"
        )
    if path.is_file():
        return TextCorpus(str(path), lambda: file_documents(path, path.name, column))
    # A run folder keeps its shards in `data`.
    for folder in (path, path / "data"):
        if (folder / SHARD_INDEX).exists():
            return ReadyShards(folder, read_shard_index(folder))
    files = _files(path)
    if not files:
        raise DataError(f"the folder {path} holds no file; put text files there")
    # Beside records, other files describe the data set, such as its README.
    records = [file for file in files if holds_records(file.name)]
    description = str(path)
    if records and len(records) < len(files):
        others = len(files) - len(records)
        description += f" (without {others} file(s) that are not .jsonl, .parquet or .arrow)"
    texts: list[Path] = []
    binary: list[Path] = []
    for file in () if records else files:
        (binary if _is_binary(file) else texts).append(file)
    chosen = records or texts
    if not chosen:
        raise DataError(
            f"the folder {path} holds no text, but {binary[0].name}; put text files there"
        )
    if binary:
        first = binary[0].relative_to(path)
        description += f" (without {len(binary)} file(s) that are not text, such as {first})"
    return TextCorpus(description, lambda: _folder_documents(path, chosen, column))


def _python_stdlib() -> TextCorpus:
    folder = Path(sysconfig.get_path("stdlib"))
    try:
        files = [file for file in _files(folder, _NOT_LIBRARY) if file.suffix == ".py"]
    except DataError:  # an embedded Python, or a library in a zip file
        files = []
    if not files:
        raise DataError(
            f"this Python has no source of its standard library at {folder}; "
            "give the path of some text instead"
        )
    return TextCorpus(
        "the Python standard library", lambda: _folder_documents(folder, files, DEFAULT_COLUMN)
    )


def _files(folder: Path, left_out: frozenset[str] = frozenset()) -> list[Path]:
    """Return all files below the folder except hidden ones, sorted by path."""
    files: list[Path] = []

    def refuse(error: OSError) -> None:
        raise unreadable(Path(error.filename or folder), error)

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name[0] != "." and name not in left_out]
        paths = (Path(parent, name) for name in names if name[0] != ".")
        files += [path for path in paths if path.is_file()]
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def _is_binary(path: Path) -> bool:
    """Whether the file was never text. A NUL further on, or what is not UTF-8, is damage, which is
    refused when it is read."""
    return b"\0" in next(iter(read_blocks(path)), b"")[:BINARY_BYTES]


def holds_records(name: str) -> bool:
    """Whether a file of this name has a document in each row or line."""
    return name.endswith((*_JSON_LINES, *TABLE_SUFFIXES))


def _folder_documents(folder: Path, files: list[Path], column: str) -> Iterator[TextDocument]:
    for file in files:
        yield from file_documents(file, file.relative_to(folder).as_posix(), column)


def file_documents(path: Path, name: str, column: str) -> Iterator[TextDocument]:
    """Yield the documents of one file, of the kind that its suffix tells, named after `name`."""
    if path.suffix in TABLE_SUFFIXES:
        for number, text in enumerate(column_texts(path, column), start=1):
            yield from _record_documents(f"{path}, row {number}", f"{name}:{number}", text or "")
    elif path.name.endswith(_JSON_LINES):
        yield from _jsonl_documents(path, name, column)
    else:
        yield from _pieces(name, _decoded(path))


def _record_documents(place: str, name: str, text: str) -> Iterator[TextDocument]:
    if len(text) > MAX_RECORD_BYTES:
        yield TextDocument(name, "", too_long=True)
        return
    if "\0" in text:
        raise _damaged(place, "its text has a NUL character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _damaged(place, "its text has half of a surrogate pair") from error
    # An empty one is a document too, which the report counts.
    yield from _pieces(name, [text]) if text else (TextDocument(name, ""),)


def _decoded(path: Path) -> Iterator[str]:
    """Yield the text of a UTF-8 file in blocks; DataError for anything else."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    position = 0
    try:
        for block in read_blocks(path):
            if (nul := block.find(b"\0")) >= 0:
                raise _not_text(path, f"byte {position + nul} is NUL")
            yield decoder.decode(block)
            position += len(block)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise _not_text(path, f"near byte {position} it is not UTF-8") from error


def _pieces(name: str, blocks: Iterable[str]) -> Iterator[TextDocument]:
    for number, text in enumerate(_in_pieces(blocks)):
        yield TextDocument(f"{name}#{number}" if number else name, text, number > 0)


def _in_pieces(blocks: Iterable[str]) -> Iterator[str]:
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


def _jsonl_documents(path: Path, name: str, field: str) -> Iterator[TextDocument]:
    for number, line in enumerate(_lines(read_blocks(path)), start=1):
        if line is None:
            yield TextDocument(f"{name}:{number}", "", too_long=True)
        elif line.strip():
            place = f"{path}, line {number}"
            text = _jsonl_text(place, line, field)
            yield from _record_documents(place, f"{name}:{number}", text)


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes | None]:
    """Yield the lines of a file; None for one of more than MAX_RECORD_BYTES, which is not held."""
    held: list[bytes] = []
    length = 0
    for block in blocks:
        *ended, rest = block.split(b"\n")
        for part in ended:
            yield b"".join([*held, part]) if length + len(part) <= MAX_RECORD_BYTES else None
            held, length = [], 0
        length += len(rest)
        held = [*held, rest] if length <= MAX_RECORD_BYTES else []
    if length:
        yield b"".join(held) if length <= MAX_RECORD_BYTES else None


def _jsonl_text(place: str, line: bytes, field: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _damaged(place, f"it is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise _damaged(place, "it is not an object")
    text = value.get(field)
    if text is None and field not in value:
        raise DataError(
            f"{place}: it has no field {field!r}, but {', '.join(map(str, value))}; name the one "
            "with the text, as in --set data.column=NAME"
        )
    if text is not None and not isinstance(text, str):
        raise _damaged(place, f"its field {field!r} is not text")
    return text or ""


def _damaged(place: str, reason: str) -> DataError:
    return DataError(f"{place}: {reason}; correct or remove it")


def _not_text(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path} is not text: {reason}; convert it to UTF-8 text or take it out of the data"
    )
