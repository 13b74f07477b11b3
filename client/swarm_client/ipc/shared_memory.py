"""Memory that the processes of one volunteer share by name: gradients, results, activations.

Owns creating, attaching and removing segments, and removing what a killed process left. Does not
own their content.

A segment is a plain file in a memory-backed folder, mapped into both processes.
multiprocessing.shared_memory is not used: in Python 3.11 every process that attaches a segment also
registers it for removal and starts a helper process to do so, and the segment vanishes for the
other processes as soon as the first of them exits. Plain files have three more advantages:
`posix_fallocate` takes the memory at once (an over-full /dev/shm is an error here and not a SIGBUS
in the middle of a step), `flock` distinguishes a segment in use from one whose users were killed
(the kernel drops the lock with the process), and systems without /dev/shm work the same way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

from swarm_shared.base.errors import CapacityError, StorageError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)


class Segment:
    """A mapped segment. Its creator unlinks it; every user closes it."""

    def __init__(self, name: str, path: Path, descriptor: int, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self._path = path
        self._descriptor: int | None = descriptor
        self._map = mmap.mmap(descriptor, nbytes)

    def __repr__(self) -> str:
        return f"Segment({self.name}, {self.nbytes} bytes)"

    @property
    def buffer(self) -> memoryview:
        """All bytes, writable."""
        return memoryview(self._map)

    def array(self, dtype: DTypeLike, count: int, offset: int = 0) -> NDArray[np.generic]:
        """`count` elements of `dtype` from byte `offset` on, without a copy."""
        itemsize = np.dtype(dtype).itemsize
        if count < 0 or offset < 0 or offset + count * itemsize > self.nbytes:
            raise ValueError(
                f"{count} elements of {np.dtype(dtype)} at byte {offset} lie outside {self!r}"
            )
        return np.frombuffer(self._map, dtype, count, offset)

    def close(self) -> None:
        """End this process's use. Arrays made from it stay valid until they are dropped."""
        if self._descriptor is None:
            return
        # While arrays exist the mapping cannot be closed; it is closed with the last of them.
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._descriptor)
        self._descriptor = None

    def unlink(self) -> None:
        """Remove the name. The memory is freed when the last process has closed it."""
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def segment_folders() -> tuple[Path, ...]:
    """The folders for segments, best first: containers often have a /dev/shm of 64 MiB only."""
    fallback = Path(tempfile.gettempdir())
    memory_backed = Path("/dev/shm")
    return (memory_backed, fallback) if memory_backed.is_dir() else (fallback,)


def create(name_hint: str, nbytes: int) -> Segment:
    """Create a zeroed segment; its name is `name_hint` and a random suffix. CapacityError without
    room."""
    if nbytes < 1:
        raise ValueError(f"a segment of {nbytes} bytes cannot be made")
    name = f"{name_hint}.{secrets.token_hex(6)}"
    _check_name(name)
    refusals: list[OSError] = []
    for folder in segment_folders():
        try:
            return _create_in(folder, name, nbytes)
        except OSError as error:
            refusals.append(error)
    reasons = "; ".join(dict.fromkeys(str(refusal) for refusal in refusals))
    if any(refusal.errno in _NO_SPACE_ERRNOS for refusal in refusals):
        raise CapacityError(
            f"no room for {nbytes / 2**20:.0f} MiB of memory shared between processes "
            f"({reasons}); free some, or enlarge /dev/shm (in Docker: --shm-size)"
        )
    raise StorageError(f"memory shared between processes cannot be made ({reasons})")


def attach(name: str) -> Segment:
    """Attach the segment that another process of this user has created. StorageError when it does
    not exist."""
    _check_name(name)
    problem = "its creator has ended"
    for folder in segment_folders():
        path = folder / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        except OSError as error:
            problem = str(error)
            continue
        try:
            found = os.fstat(descriptor)
            # Another user can see the name of a segment, and give it to a file in the other folder.
            if found.st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                return Segment(name, path, descriptor, found.st_size)
        except BaseException:
            os.close(descriptor)
            raise
        problem = f"{path} is another user's"
        os.close(descriptor)
    raise StorageError(f"there is no shared memory called {name}; {problem}")


def unlink_stale(prefix: str) -> None:
    """Remove the segments whose names begin with `prefix` and that no living process has open.

    For the daemon's start: a killed process cannot clean up after itself.
    """
    _check_name(prefix)
    for folder in segment_folders():
        for path in folder.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                _unlink_if_unused(path)


def _check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} cannot be the name of a shared memory segment")


def _create_in(folder: Path, name: str, nbytes: int) -> Segment:
    path = folder / name
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        _reserve(descriptor, nbytes)
        if os.fstat(descriptor).st_nlink == 0:
            raise StorageError(f"{path} was removed while it was created; try again")
        return Segment(name, path, descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise


def _reserve(descriptor: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
    else:  # macOS
        os.ftruncate(descriptor, nbytes)


def _unlink_if_unused(path: Path) -> None:
    """BlockingIOError when a living process has it open."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(descriptor)
