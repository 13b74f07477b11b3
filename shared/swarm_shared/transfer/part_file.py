"""A file that arrives in chunks, in any order, and may be resumed after a crash.

    NAME.part           the bytes, each chunk at its place
    NAME.part.journal   a first line that names the whole, then a line per chunk: index, SHA-256

Owns both files. A chunk counts as present when its journal line exists and its bytes still have
that hash: what a crash left behind is checked, not trusted. Blocking: call from a thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path
from typing import BinaryIO

from swarm_shared.base.atomic_file import make_folder, storage_error, sync_folder
from swarm_shared.base.errors import StorageError
from swarm_shared.base.text import size_text

CHUNK_BYTES = 2**20
"""Size of a chunk, as usual in the field (BitTorrent's piece): an error costs little, overhead is
1e-4."""

FREE_MARGIN_BYTES = 16 * 2**20
"""Disk space left free, so that a download never takes the last space from a database or a log."""


class PartFile:
    """The chunks of one item on their way to `destination`."""

    def __init__(self, destination: Path, item: str, total_bytes: int, sha256: str) -> None:
        self.destination = destination
        self.total_bytes = total_bytes
        self._sha256 = sha256
        self._heading = json.dumps(
            {"item": item, "bytes": total_bytes, "sha256": sha256, "chunk": CHUNK_BYTES}
        )
        self._part = destination.with_name(f"{destination.name}.part")
        self._journal_path = destination.with_name(f"{destination.name}.part.journal")
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._journal: BinaryIO | None = None
        self._closed = False

    @property
    def chunks(self) -> int:
        """Number of chunks of the item."""
        return -(-self.total_bytes // CHUNK_BYTES)

    def chunk_bytes(self, index: int) -> int:
        """Size of a chunk; the last one may be shorter."""
        return min(CHUNK_BYTES, self.total_bytes - index * CHUNK_BYTES)

    def is_complete(self) -> bool:
        """Whether the destination exists already, with the right bytes."""
        try:
            if self.destination.stat().st_size != self.total_bytes:
                return False
            return _sha256_of(self.destination) == self._sha256
        except OSError:
            return False

    def open(self) -> set[int]:
        """Reserve the space on the disk; return the chunks of an earlier attempt, hash-checked."""
        try:
            make_folder(self.destination.parent)
            present = self._read_journal()
            self._check_space()
            self._file = self._part.open("r+b" if self._part.exists() else "w+b")
            self._file.truncate(self.total_bytes)
            present = {i: digest for i, digest in present.items() if self._holds(i, digest)}
            self._journal = self._journal_path.open("wb")
            self._journal.write(f"{self._heading}\n".encode())
            for index, digest in present.items():
                self._journal.write(f"{index} {digest}\n".encode())
            self._journal.flush()
        except OSError as error:
            self.close()
            raise storage_error(self._part, error) from error
        return set(present)

    def write(self, index: int, content: bytes | bytearray, digest: str) -> None:
        """Write a chunk whose hash was checked at its place."""
        assert len(content) == self.chunk_bytes(index)
        try:
            with self._lock:
                if self._closed:  # a thread that was abandoned while it waited
                    return
                assert self._file is not None
                assert self._journal is not None
                self._file.seek(index * CHUNK_BYTES)
                self._file.write(content)
                self._file.flush()
                self._journal.write(f"{index} {digest}\n".encode())
                self._journal.flush()
        except OSError as error:
            raise storage_error(self._part, error) from error

    def finish(self) -> bool:
        """Check the whole and move it into place. False when the whole has another hash."""
        try:
            with self._lock:
                assert self._file is not None
                self._file.flush()
                os.fsync(self._file.fileno())
            if _sha256_of(self._part) != self._sha256:
                return False
            self.close()
            self._part.replace(self.destination)
            self._journal_path.unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(self.destination, error) from error
        sync_folder(self.destination.parent)
        return True

    def restart(self) -> None:
        """Forget every chunk: the whole was wrong."""
        try:
            with self._lock:
                assert self._journal is not None
                self._journal.seek(0)
                self._journal.truncate()
                self._journal.write(f"{self._heading}\n".encode())
                self._journal.flush()
        except OSError as error:
            raise storage_error(self._part, error) from error

    def close(self) -> None:
        """Close the files; what has arrived stays for the next attempt."""
        with self._lock:
            self._closed = True
            for file in (self._file, self._journal):
                if file is not None:
                    # Data buffered for a full disk cannot be flushed; it is not journalled.
                    with contextlib.suppress(OSError):
                        file.close()

    def _read_journal(self) -> dict[int, str]:
        try:
            lines = self._journal_path.read_text("ascii").splitlines()
        except (OSError, UnicodeDecodeError):
            return {}
        if not lines or lines[0] != self._heading:
            self._part.unlink(missing_ok=True)
            return {}
        present: dict[int, str] = {}
        for line in lines[1:]:
            index, _, digest = line.partition(" ")
            if index.isdecimal() and int(index) < self.chunks and len(digest) == 64:
                present[int(index)] = digest
        return present

    def _check_space(self) -> None:
        # A part file is sparse: only its allocated blocks take space already.
        allocated_bytes = 0
        with contextlib.suppress(OSError):
            status = self._part.stat()
            allocated_bytes = getattr(status, "st_blocks", 0) * 512
        needed = max(0, self.total_bytes - allocated_bytes) + FREE_MARGIN_BYTES
        free = shutil.disk_usage(self.destination.parent).free
        if free < needed:
            raise StorageError(
                f"{self.destination} needs {size_text(needed)} and its disk has "
                f"{size_text(free)} free; free some space there and try again"
            )

    def _holds(self, index: int, digest: str) -> bool:
        assert self._file is not None
        self._file.seek(index * CHUNK_BYTES)
        return hashlib.sha256(self._file.read(self.chunk_bytes(index))).hexdigest() == digest


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
