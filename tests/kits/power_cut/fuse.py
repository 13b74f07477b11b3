"""FUSE's protocol between the kernel and a file system, without a library (linux/fuse.h, 7.31).

Owns the layout of messages and the mount. What the operations do is `kits.power_cut.server`'s.
A library of Debian's would be one more thing to install, and bindings in PyPI speak to it, too; the
protocol is small. Mounting needs root.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import tempfile
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from kits.power_cut.disk import Inode

DEVICE = Path("/dev/fuse")
MAX_WRITE_BYTES = 128 * 1024
REQUEST_BYTES = MAX_WRITE_BYTES + 4096

VERSION = (7, 31)
_BIG_WRITES = 1 << 5
_WRITE_CACHE = 1
_VALID_SECONDS = 3600
"""Seconds for which the kernel may remember names and sizes. Only the kernel changes them."""

_libc = ctypes.CDLL(None, use_errno=True)
_MNT_DETACH = 2
_MS_NOSUID_NODEV = 2 | 4


class Operation(IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    RENAME2 = 45


UNANSWERED = (Operation.FORGET, Operation.BATCH_FORGET, Operation.INTERRUPT)


class SetAttributes:
    """Bits of a SETATTR."""

    MODE, UID, GID, SIZE = 1, 2, 4, 8


@dataclass(frozen=True, slots=True)
class Request:
    operation: int
    unique: int
    node: int
    uid: int
    gid: int
    body: memoryview

    def fields(self, layout: str) -> tuple[int, ...]:
        return struct.unpack_from(layout, self.body)

    def name(self, layout: str = "") -> bytes:
        """The name after the fields."""
        return self.names(layout)[0]

    def names(self, layout: str = "") -> list[bytes]:
        return bytes(self.body[struct.calcsize(layout) :]).split(b"\0")[:-1]


def is_no_change(request: Request) -> bool:
    """Whether it writes mapped memory, or sets attributes and neither mode nor size."""
    if request.operation == Operation.SETATTR:
        (valid,) = request.fields("<I")
        return not valid & (SetAttributes.MODE | SetAttributes.SIZE)
    if request.operation == Operation.WRITE:
        _, _, _, flags = request.fields("<QQII")
        return bool(flags & _WRITE_CACHE)
    return False


_HEADER = struct.Struct("<IIQQIIIHH")
_ANSWER = struct.Struct("<IiQ")


def parse(message: bytes) -> Request:
    _, operation, unique, node, uid, gid, _, _, _ = _HEADER.unpack_from(message)
    return Request(operation, unique, node, uid, gid, memoryview(message)[_HEADER.size :])


def answer(unique: int, body: bytes = b"", error: int = 0) -> bytes:
    return _ANSWER.pack(_ANSWER.size + len(body), -error, unique) + body


def init_answer() -> bytes:
    """No caching of writes, so that each write(2) is here when it returns."""
    return struct.pack(
        "<IIIIHHIIHHII24x", *VERSION, 2**17, _BIG_WRITES, 12, 9, MAX_WRITE_BYTES, 1, 0, 0, 0, 0
    )


def attributes(inode: Inode) -> bytes:
    size = len(inode.content)
    seconds, rest = divmod(inode.changed_at, 1)
    at, nanoseconds = int(seconds), int(rest * 1e9)
    return struct.pack(
        "<6Q10I", inode.number, size, -(-size // 512), at, at, at, nanoseconds, nanoseconds,
        nanoseconds, inode.mode, inode.links, inode.uid, inode.gid, 0, 4096, 0,
    )  # fmt: skip


def attributes_answer(inode: Inode) -> bytes:
    return struct.pack("<QII", _VALID_SECONDS, 0, 0) + attributes(inode)


def entry(inode: Inode) -> bytes:
    valid = (_VALID_SECONDS, _VALID_SECONDS, 0, 0)
    return struct.pack("<QQQQII", inode.number, 0, *valid) + attributes(inode)


def opened() -> bytes:
    keep_cache = 2
    return struct.pack("<QII", 0, keep_cache, 0)


def space() -> bytes:
    free_blocks = 2**24
    return struct.pack(
        "<5Q4I24x", free_blocks, free_blocks, free_blocks, 2**20, 2**20, 4096, 255, 4096, 0
    )


def names_from(folder: Inode, modes: dict[int, int], offset: int, size: int) -> bytes:
    """The part of a listing that begins at an entry's number and has at most so many bytes."""
    listing = b""
    entries = [(b".", folder.number), (b"..", folder.number), *folder.names.items()]
    for index, (name, number) in enumerate(entries[offset:], offset + 1):
        kind = stat.S_IFMT(modes[number]) >> 12
        part = struct.pack("<QQII", number, index, len(name), kind) + name
        part += bytes(-len(part) % 8)
        if len(listing) + len(part) > size:
            break
        listing += part
    return listing


def why_not_here() -> str | None:
    """The reason why no such file system can be mounted here, for a test's skip."""
    if os.geteuid() != 0:
        return "needs root, to mount a file system"
    with tempfile.TemporaryDirectory() as place:
        try:
            connection = mount(Path(place))
        except OSError as error:
            return f"this kernel or container does not allow mounting with FUSE ({error})"
        os.close(connection)
        unmount(Path(place))
    return None


def mount(place: Path) -> int:
    """Mount there; return the connection to the kernel, to be read and written."""
    connection = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={connection},rootmode=40755,user_id=0,group_id=0,default_permissions,allow_other"
    if _libc.mount(b"power-cut", bytes(place), b"fuse", _MS_NOSUID_NODEV, options.encode()) != 0:
        number = ctypes.get_errno()
        os.close(connection)
        raise OSError(number, f"mount: {os.strerror(number)}", str(place))
    return connection


def unmount(place: Path) -> None:
    if _libc.umount2(bytes(place), _MNT_DETACH) != 0:
        number = ctypes.get_errno()
        if number != errno.EINVAL:  # nothing is mounted there
            raise OSError(number, f"umount: {os.strerror(number)}", str(place))
