"""A disk in memory that separates what was written from what was synced. Pure: no I/O.

The model is that of Pillai et al. ("All File Systems Are Not Created Equal: On the Complexity of
Crafting Crash-Consistent Applications", OSDI 2014), and no kinder than POSIX:

- what was written to a file, and its length and mode, are on the disk after an fsync of the file;
- names in a folder (create, link, rename, unlink) are there after an fsync of the folder, and an
  fsync of the file does not help;
- of the rest a cut leaves nothing, or (with a seed) any part: each page as it was at
  some moment since the sync, any of the lengths since, and any of the changes of names. Changes
  of one name or of one file keep their order, and a rename is one change, as in the journal of
  every common file system.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

PAGE_BYTES = 4096
"""Size of what a cut tears a write into, in bytes: a page of the kernel's cache."""

MOST_MOMENTS = 16
"""Number of moments from which a cut draws a file's pages: each is a copy of the file."""

ROOT = 1
"""Number of the root folder, as FUSE fixes it."""

_KEPT_SHARES = (0.0, 0.5, 0.95)
"""Shares of the unsynced changes that survive a cut; three consecutive seeds have all of them."""


@dataclass(slots=True)
class Write:
    offset: int
    data: bytes

    def apply(self, content: bytearray) -> None:
        end = self.offset + len(self.data)
        if len(content) < self.offset:
            content.extend(bytes(self.offset - len(content)))
        content[self.offset : end] = self.data


@dataclass(slots=True)
class Resize:
    size: int

    def apply(self, content: bytearray) -> None:
        if self.size < len(content):
            del content[self.size :]
        else:
            content.extend(bytes(self.size - len(content)))


@dataclass(slots=True)
class Inode:
    """A file, folder or socket: as programs see it, and as a cut would leave it."""

    number: int
    mode: int
    uid: int
    gid: int
    durable_mode: int
    links: int = 1
    changed_at: float = 0.0
    content: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    unsynced: list[Write | Resize] = field(default_factory=list)
    names: dict[bytes, int] = field(default_factory=dict)
    durable_names: dict[bytes, int] = field(default_factory=dict)

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.mode)

    def change(self, what: Write | Resize) -> None:
        what.apply(self.content)
        self.unsynced.append(what)

    def sync(self) -> None:
        for what in self.unsynced:
            what.apply(self.durable)
        self.unsynced.clear()
        self.durable_mode = self.mode


@dataclass(frozen=True, slots=True)
class Renaming:
    """A change of names that happens as one: (folder, name, inode or None for no such name)."""

    slots: tuple[tuple[int, bytes, int | None], ...]
    moved: int
    """The inode that gets or loses a name."""

    def touches(self, folder: int) -> bool:
        return any(there == folder for there, _, _ in self.slots)

    @property
    def subjects(self) -> set[object]:
        """What it has in common with changes that it must follow."""
        return {self.moved, *((folder, name) for folder, name, _ in self.slots)}


class Disk:
    """Files and folders by number. Every refusal is an OSError with the kernel's number."""

    def __init__(self) -> None:
        folder = stat.S_IFDIR | 0o755
        self.inodes = {ROOT: Inode(ROOT, folder, 0, 0, folder, links=2)}
        self._next = ROOT + 1
        self._renamings: list[Renaming] = []

    # ---- what programs do

    def folder(self, number: int) -> Inode:
        inode = self.inodes[number]
        if not inode.is_folder:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return inode

    def lookup(self, folder: int, name: bytes) -> Inode:
        number = self.folder(folder).names.get(name)
        if number is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return self.inodes[number]

    def make(self, folder: int, name: bytes, mode: int, uid: int = 0, gid: int = 0) -> Inode:
        """Make a file, folder or socket, as the type in `mode` says."""
        self._refuse_existing(folder, name)
        links = 2 if stat.S_ISDIR(mode) else 1
        # Until its first sync it may appear, empty, with the mode that it was made with.
        inode = Inode(self._next, mode, uid, gid, durable_mode=mode, links=links)
        self._next += 1
        self.inodes[inode.number] = inode
        self._rename(Renaming(((folder, name, inode.number),), inode.number))
        return inode

    def link(self, number: int, folder: int, name: bytes) -> Inode:
        self._refuse_existing(folder, name)
        inode = self.inodes[number]
        if inode.is_folder:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        inode.links += 1
        self._rename(Renaming(((folder, name, number),), number))
        return inode

    def remove(self, folder: int, name: bytes, *, a_folder: bool) -> None:
        inode = self.lookup(folder, name)
        self._refuse_removal(inode, a_folder)
        inode.links -= 1
        self._rename(Renaming(((folder, name, None),), inode.number))

    def rename(self, folder: int, name: bytes, new_folder: int, new_name: bytes) -> None:
        inode = self.lookup(folder, name)
        replaced = self.folder(new_folder).names.get(new_name)
        if replaced == inode.number:
            return
        if replaced is not None:
            self._refuse_removal(self.inodes[replaced], inode.is_folder)
            self.inodes[replaced].links -= 1
        slots = ((folder, name, None), (new_folder, new_name, inode.number))
        self._rename(Renaming(slots, inode.number))

    def sync(self, number: int) -> None:
        inode = self.inodes[number]
        inode.sync()
        if inode.is_folder:
            self._sync_names(number)

    def sync_everything(self) -> None:
        for inode in self.inodes.values():
            inode.sync()
        for renaming in self._renamings:
            self._make_durable(renaming)
        self._renamings.clear()

    # ---- what a power cut does

    def cut(self, seed: int | None = None) -> None:
        """Leave what was synced; with a seed, also any part of the rest."""
        chance = None if seed is None else random.Random(seed)
        keep = 0.0 if seed is None else _KEPT_SHARES[seed % len(_KEPT_SHARES)]
        lost: set[object] = set()
        for renaming in self._renamings:
            if chance is not None and chance.random() < keep and not renaming.subjects & lost:
                self._make_durable(renaming)
            else:
                lost |= renaming.subjects
        self._renamings.clear()
        for inode in self.inodes.values():
            if chance is not None and inode.unsynced:
                inode.durable = _torn(inode, chance, chance.choice(_KEPT_SHARES))
            if chance is not None and chance.random() < keep:
                inode.durable_mode = inode.mode
            inode.unsynced.clear()
            inode.content, inode.mode = bytearray(inode.durable), inode.durable_mode
            inode.names = dict(inode.durable_names)
        names = Counter(self._reachable(ROOT))
        self.inodes = {number: self.inodes[number] for number in names}
        for number, inode in self.inodes.items():
            inode.links = 2 if inode.is_folder else names[number]

    # ---- names

    def _rename(self, renaming: Renaming) -> None:
        for folder, name, number in renaming.slots:
            _put(self.folder(folder).names, name, number)
        self._renamings.append(renaming)

    def _make_durable(self, renaming: Renaming) -> None:
        for folder, name, number in renaming.slots:
            _put(self.inodes[folder].durable_names, name, number)

    def _sync_names(self, folder: int) -> None:
        """Make the changes in a folder durable, and those that they follow elsewhere."""
        wanted: set[object] = set()
        left: list[Renaming] = []
        synced: list[Renaming] = []
        for renaming in reversed(self._renamings):
            if renaming.touches(folder) or renaming.subjects & wanted:
                wanted |= renaming.subjects
                synced.append(renaming)
            else:
                left.append(renaming)
        for renaming in reversed(synced):
            self._make_durable(renaming)
        self._renamings = left[::-1]

    def _refuse_existing(self, folder: int, name: bytes) -> None:
        if name in self.folder(folder).names:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))

    def _refuse_removal(self, inode: Inode, a_folder: bool) -> None:
        refusal = None
        if inode.is_folder != a_folder:
            refusal = errno.EISDIR if inode.is_folder else errno.ENOTDIR
        elif inode.names:
            refusal = errno.ENOTEMPTY
        if refusal is not None:
            raise OSError(refusal, os.strerror(refusal))

    def _reachable(self, number: int) -> Iterator[int]:
        """Yield every name's inode, so that one with two names comes twice."""
        yield number
        for inner in self.inodes[number].names.values():
            yield from self._reachable(inner)


def _put(names: dict[bytes, int], name: bytes, number: int | None) -> None:
    if number is None:
        names.pop(name, None)
    else:
        names[name] = number


def _torn(inode: Inode, chance: random.Random, keep: float) -> bytearray:
    """Each page as it was at some moment since the sync, cut off at one of the lengths since."""
    moments = range(len(inode.unsynced))
    kept = set(chance.sample(moments, min(len(moments), MOST_MOMENTS)))
    versions = [inode.durable]
    content = bytearray(inode.durable)
    for moment, what in enumerate(inode.unsynced):
        what.apply(content)
        if moment in kept or moment == moments[-1]:
            versions.append(bytearray(content))
    size = len(_one_of(versions, chance, keep))
    torn = bytearray()
    for start in range(0, size, PAGE_BYTES):
        page = _one_of(versions, chance, keep)[start : start + PAGE_BYTES]
        torn += page + bytes(PAGE_BYTES - len(page))
    del torn[size:]
    return torn


def _one_of(versions: list[bytearray], chance: random.Random, keep: float) -> bytearray:
    return versions[-1] if chance.random() < keep else chance.choice(versions)
