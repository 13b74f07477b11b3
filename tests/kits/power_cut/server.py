"""A mounted file system whose power can be cut. A program; `kits.power_cut` starts it.

A process of its own, because one that serves a file system must not wait for it. Commands come as
lines of JSON on standard input and are answered by one line each; the end of input unmounts.

At a cut the processes that were named die by SIGKILL, then the connection to the kernel is closed,
which fails every operation under way and empties the kernel's cache; the next mount shows what is
left on the disk. An operation in front of which the power is cut leaves no trace.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kits.power_cut import fuse
from kits.power_cut.disk import Disk, Inode, Resize, Write
from kits.power_cut.fuse import Operation, Request, SetAttributes

CHANGES = frozenset({
    Operation.SETATTR, Operation.MKNOD, Operation.MKDIR, Operation.UNLINK, Operation.RMDIR,
    Operation.RENAME, Operation.RENAME2, Operation.LINK, Operation.WRITE, Operation.FSYNC,
    Operation.FSYNCDIR, Operation.CREATE,
})  # fmt: skip
"""What is counted: operations that change what is on the disk or what may be lost.

Not counted are writes of mapped pages, whose moments the kernel chooses, and changes of owners,
with which SQLite begins to read when root does."""


class FileSystem:
    """The operations of a disk, as the kernel asks for them."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk

    def handle(self, request: Request) -> bytes:
        """The answer's body; OSError is the answer, too."""
        handler = _HANDLERS.get(request.operation)
        if handler is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        return handler(self, request)

    def _inode(self, request: Request) -> Inode:
        return self.disk.inodes[request.node]

    def _changed(self, inode: Inode) -> Inode:
        inode.changed_at = time.time()
        return inode

    def init(self, request: Request) -> bytes:
        return fuse.init_answer()

    def nothing(self, request: Request) -> bytes:
        return b""

    def lookup(self, request: Request) -> bytes:
        return fuse.entry(self.disk.lookup(request.node, request.name()))

    def get_attributes(self, request: Request) -> bytes:
        return fuse.attributes_answer(self._inode(request))

    def set_attributes(self, request: Request) -> bytes:
        valid, _, _, size, *_, mode, _, uid, gid, _ = request.fields("<IIQQQQQQ8I")
        inode = self._inode(request)
        if valid & SetAttributes.MODE:
            inode.mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(mode)
        if valid & SetAttributes.UID:
            inode.uid = uid
        if valid & SetAttributes.GID:
            inode.gid = gid
        if valid & SetAttributes.SIZE:
            inode.change(Resize(size))
        return fuse.attributes_answer(self._changed(inode))

    def make_node(self, request: Request) -> bytes:
        mode, *_ = request.fields("<4I")
        return fuse.entry(self._made(request, request.name("<4I"), mode))

    def make_folder(self, request: Request) -> bytes:
        mode, _ = request.fields("<2I")
        return fuse.entry(self._made(request, request.name("<2I"), mode | stat.S_IFDIR))

    def create(self, request: Request) -> bytes:
        _, mode, _, _ = request.fields("<4I")
        made = self._made(request, request.name("<4I"), mode | stat.S_IFREG)
        return fuse.entry(made) + fuse.opened()

    def _made(self, request: Request, name: bytes, mode: int) -> Inode:
        return self._changed(self.disk.make(request.node, name, mode, request.uid, request.gid))

    def link(self, request: Request) -> bytes:
        (number,) = request.fields("<Q")
        return fuse.entry(self.disk.link(number, request.node, request.name("<Q")))

    def unlink(self, request: Request) -> bytes:
        self.disk.remove(request.node, request.name(), a_folder=False)
        return b""

    def remove_folder(self, request: Request) -> bytes:
        self.disk.remove(request.node, request.name(), a_folder=True)
        return b""

    def rename(self, request: Request) -> bytes:
        (new_folder,) = request.fields("<Q")
        old, new = request.names("<Q")
        self.disk.rename(request.node, old, new_folder, new)
        return b""

    def rename2(self, request: Request) -> bytes:
        new_folder, flags, _ = request.fields("<QII")
        if flags:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        old, new = request.names("<QII")
        self.disk.rename(request.node, old, new_folder, new)
        return b""

    def open(self, request: Request) -> bytes:
        return fuse.opened()

    def read(self, request: Request) -> bytes:
        _, offset, size, *_ = request.fields("<QQII")
        return bytes(self._inode(request).content[offset : offset + size])

    def write(self, request: Request) -> bytes:
        _, offset, size, *_ = request.fields("<QQIIQII")
        data = bytes(request.body[40 : 40 + size])
        self._changed(self._inode(request)).change(Write(offset, data))
        return size.to_bytes(8, "little")

    def space(self, request: Request) -> bytes:
        return fuse.space()

    def sync(self, request: Request) -> bytes:
        self.disk.sync(request.node)
        return b""

    def list_names(self, request: Request) -> bytes:
        _, offset, size, *_ = request.fields("<QQII")
        folder = self.disk.folder(request.node)
        modes = {n: self.disk.inodes[n].mode for n in (*folder.names.values(), folder.number)}
        return fuse.names_from(folder, modes, offset, size)


_HANDLERS: dict[int, Callable[[FileSystem, Request], bytes]] = {
    Operation.INIT: FileSystem.init,
    Operation.DESTROY: FileSystem.nothing,
    Operation.LOOKUP: FileSystem.lookup,
    Operation.GETATTR: FileSystem.get_attributes,
    Operation.SETATTR: FileSystem.set_attributes,
    Operation.MKNOD: FileSystem.make_node,
    Operation.MKDIR: FileSystem.make_folder,
    Operation.CREATE: FileSystem.create,
    Operation.LINK: FileSystem.link,
    Operation.UNLINK: FileSystem.unlink,
    Operation.RMDIR: FileSystem.remove_folder,
    Operation.RENAME: FileSystem.rename,
    Operation.RENAME2: FileSystem.rename2,
    Operation.OPEN: FileSystem.open,
    Operation.READ: FileSystem.read,
    Operation.WRITE: FileSystem.write,
    Operation.STATFS: FileSystem.space,
    Operation.FSYNC: FileSystem.sync,
    Operation.FSYNCDIR: FileSystem.sync,
    Operation.OPENDIR: FileSystem.open,
    Operation.READDIR: FileSystem.list_names,
    Operation.RELEASE: FileSystem.nothing,
    Operation.RELEASEDIR: FileSystem.nothing,
}


class Server:
    """The mount, its disk, and the cut that is due."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._files = FileSystem(Disk())
        self._connection: int | None = None
        self._operations = 0
        self._due: int | None = None
        self._victims: list[int] = []
        self._seed: int | None = None
        self._cut_before: str | None = None
        self._saved = Disk()

    def run(self) -> None:
        lines = sys.stdin.fileno()
        waiting = b""
        while True:
            watched = [lines] if self._connection is None else [lines, self._connection]
            ready, _, _ = select.select(watched, [], [])
            if self._connection in ready:
                self._serve()
            if lines in ready:
                more = os.read(lines, 65536)
                if not more:
                    return
                *whole, waiting = (waiting + more).split(b"\n")
                for line in whole:
                    print(json.dumps(self._obey(json.loads(line))), flush=True)

    def close(self) -> None:
        if self._connection is not None:
            os.close(self._connection)
            self._connection = None
        fuse.unmount(self._place)

    def _obey(self, command: dict[str, Any]) -> dict[str, Any]:
        match command["do"]:
            case "mount":
                # The root's cached attributes went with the old connection.
                if self._connection is None:
                    self._connection = fuse.mount(self._place)
                self._operations, self._due = 0, None
            case "arm":
                self._due, self._victims = self._operations + command["after"], command["victims"]
                self._seed, self._cut_before = command["seed"], None
            case "cut":
                self._victims, self._seed = command["victims"], command["seed"]
                self._cut("the lab's command")
            case "sync":
                self._files.disk.sync_everything()
            case "save":
                self._saved = copy.deepcopy(self._files.disk)
            case "go back":
                self._cut("going back")
                self._files.disk = copy.deepcopy(self._saved)
        return {"operations": self._operations, "cut_before": self._cut_before}

    def _serve(self) -> None:
        assert self._connection is not None
        try:
            message = os.read(self._connection, fuse.REQUEST_BYTES)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                return  # the request was taken back
            raise
        request = fuse.parse(message)
        if request.operation in CHANGES and not fuse.is_no_change(request):
            if self._due is not None and self._operations >= self._due:
                self._cut(self._described(request))
                return
            self._operations += 1
        if request.operation in fuse.UNANSWERED:
            return
        try:
            answer = fuse.answer(request.unique, self._files.handle(request))
        except OSError as error:
            answer = fuse.answer(request.unique, error=error.errno or errno.EIO)
        with contextlib.suppress(FileNotFoundError):  # its process died meanwhile
            os.write(self._connection, answer)

    def _cut(self, before: str) -> None:
        for pid in self._victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._files.disk.cut(self._seed)
        # First the connection: unmounting writes what programs had mapped, which would come here.
        if self._connection is not None:
            os.close(self._connection)
        self._connection = None
        fuse.unmount(self._place)
        self._due, self._cut_before = None, before

    def _described(self, request: Request) -> str:
        names = {
            number: name for folder in self._files.disk.inodes.values()
            for name, number in folder.names.items()
        }  # fmt: skip
        name = names.get(request.node, b"").decode(errors="replace")
        return f"{Operation(request.operation).name} {name}"


def main() -> None:
    server = Server(Path(sys.argv[1]))
    try:
        server.run()
    finally:
        server.close()


if __name__ == "__main__":
    main()
