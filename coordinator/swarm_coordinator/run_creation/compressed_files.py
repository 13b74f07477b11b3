"""The bytes of a file that may be compressed, as `.gz` or `.zst`; the only door to zstandard."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from swarm_shared.base.errors import ConfigurationError, DataError

BLOCK_BYTES = 1024 * 1024
_COMPRESSED_BLOCK_BYTES = 1024
"""Bytes decompressed at once, into 32 MiB at most: four of them can be a block of 128 KiB."""
_MAX_WINDOW_BYTES = 2**31
"""What `zstd --long=31` needs, with which some published corpora are compressed."""


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in blocks, decompressed. DataError if that is not possible."""
    try:
        with path.open("rb") as file:
            if path.suffix == ".zst":
                yield from _zst_blocks(path, file)
            elif path.suffix == ".gz":
                with gzip.open(file) as content:
                    yield from _blocks(content)
            else:
                yield from _blocks(file)
    except EOFError as error:
        raise _cut_short(path) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(path, error) from error
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"cannot read {path} ({error.strerror}); check its permissions")


def _blocks(file: BinaryIO | gzip.GzipFile) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


def require_zstandard(name: str) -> ModuleType:
    """Import zstandard. ConfigurationError that names the file without it."""
    try:
        import zstandard
    except ImportError as error:
        raise ConfigurationError(
            f"reading {name} needs zstandard, which is not installed; install it with `pip install "
            "'swarmtrain[data]'`, or decompress the file"
        ) from error
    module: ModuleType = zstandard
    return module


def _zst_blocks(path: Path, file: BinaryIO) -> Iterator[bytes]:
    zstandard = require_zstandard(str(path))
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    frame = None
    try:
        while block := file.read(_COMPRESSED_BLOCK_BYTES):
            while block:
                frame = frame or decompressor.decompressobj()
                yield frame.decompress(block)
                block = frame.unused_data
                if frame.eof:
                    frame = None
    except zstandard.ZstdError as error:
        raise _damaged(path, error) from error
    if frame is not None:
        raise _cut_short(path)


def _cut_short(path: Path) -> DataError:
    return DataError(f"{path} is cut short; copy or download it again")


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be decompressed ({error}); copy or download it again")
