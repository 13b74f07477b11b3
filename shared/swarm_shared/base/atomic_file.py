"""Atomic file writes: to a temporary file, synced, then renamed into place.

Owns the only way this project writes a file that must survive a crash, and the translation of the
operating system's refusals into one sentence for a person. The order (write, fsync, rename, fsync
of the folder) is the one POSIX needs so that a reader never sees half a file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from swarm_shared.base.errors import StorageError

PRIVATE_MODE = 0o600
PUBLIC_MODE = 0o644

_ADVICE: dict[int, str] = {
    errno.ENOSPC: "the disk is full; free some space there and try again",
    errno.EDQUOT: "your disk quota is used up; free some space there and try again",
    errno.EFBIG: "the file is larger than this file system allows; use another disk",
    errno.EACCES: "you may not write there; change its permissions or choose another folder",
    errno.EPERM: "you may not write there; change its permissions or choose another folder",
    errno.EROFS: "that file system is read-only; choose another folder",
    errno.ENOENT: "that folder does not exist; make it or choose another folder",
    errno.EEXIST: "there is a file in its place; move it away or choose another folder",
    errno.ENOTDIR: "part of that path is a file, not a folder; choose another folder",
    errno.EISDIR: "there is a folder of that name; move it away or choose another name",
    errno.ENAMETOOLONG: "that name is too long; choose a shorter one",
    errno.EMFILE: "this process has too many files open; raise the limit with `ulimit -n`",
    errno.EIO: "the disk reports a fault; check it, or use another one",
}


def storage_error(path: Path, error: OSError) -> StorageError:
    """Explain the operating system's refusal to a person, in one sentence."""
    code = error.errno or 0
    advice = _ADVICE.get(code, f"{error.strerror or error}; check the disk and its permissions")
    return StorageError(f"cannot write {path}: {advice}")


@contextlib.contextmanager
def atomic_file(path: Path, mode: int = PUBLIC_MODE) -> Iterator[BinaryIO]:
    """Open a temporary file for writing; it replaces `path` when the block ends without an error.

    On any error (cancellation too) `path` stays as it was and the temporary file is removed.
    """
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:64]}.")
    except OSError as error:
        raise storage_error(path, error) from error
    done = False
    try:
        # mkstemp creates the file with mode 0600, so a private file is private from the start.
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.chmod(temporary, mode)  # noqa: PTH101
            os.fsync(file.fileno())
        os.replace(temporary, path)  # noqa: PTH105 (`temporary` is a name, as mkstemp gives it)
        done = True
        sync_folder(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        if not done:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()


def write_atomically(path: Path, content: bytes, mode: int = PUBLIC_MODE) -> None:
    """Replace `path` by `content`; a crash leaves either the old file or the new one."""
    with atomic_file(path, mode) as file:
        file.write(content)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder and its missing parents survive a power cut; `mode` is the folder's own.

    A folder that exists is left as it is. OSError passes through.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_tree(folder: Path) -> None:
    """Make a folder with all its files and folders survive a power cut; OSError passes through.

    The folder's own name is its parent's: `sync_folder(folder.parent)`.
    """
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
        elif path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut, where the system can sync a folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows cannot open a folder; its renames are journalled.
        return
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
