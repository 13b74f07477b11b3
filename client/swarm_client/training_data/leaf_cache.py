"""Leaves on the disk, within a budget: two files of slots, and the least recently needed leaf gives
way.

    leaves        the bytes, a slot of 16 KiB for each leaf
    leaves.index  a record for each slot: shard, leaf, hash of the bytes

A cache: nothing is synced. A leaf counts as present when its bytes still have the hash of its
record, so that what a crash left behind is fetched again and never used. Blocking, and safe to use
from several threads.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from swarm_shared.base.atomic_file import make_folder, storage_error
from swarm_shared.data.merkle import LEAF_BYTES, hash_leaf
from swarm_shared.data.sample_ranges import LeafId

log = logging.getLogger(__name__)

GROWTH_BYTES = 16 * 2**20
"""Bytes by which the cache grows at once, so that the disk is measured rarely."""

_RECORD = struct.Struct("<III32s")
"""Shard, leaf, length of the bytes, their hash."""


class SlotTable:
    """Which leaf lies in which slot. Pure.

    Invariants: no slot has two leaves, no leaf two slots; there are never more slots than
    `granted`; the leaf that gives way is the one not needed for longest.
    """

    def __init__(self, granted: int) -> None:
        self.granted = granted
        self._slots: OrderedDict[LeafId, int] = OrderedDict()
        """The least recently needed first."""
        self._free: list[int] = []
        self._used = 0
        """Slots that were ever used; those from here on are free as well."""

    def __contains__(self, leaf: LeafId) -> bool:
        return leaf in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def is_full(self) -> bool:
        return not self._free and self._used >= self.granted

    def restore(self, slot: int, leaf: LeafId | None) -> None:
        """Record what a slot held at the last start; slots come in order."""
        assert slot == self._used < self.granted
        self._used += 1
        if leaf is None or leaf in self._slots:
            self._free.append(slot)
        else:
            self._slots[leaf] = slot

    def needed(self, leaf: LeafId) -> int | None:
        """Return the leaf's slot; it is the last to give way now."""
        slot = self._slots.get(leaf)
        if slot is not None:
            self._slots.move_to_end(leaf)
        return slot

    def place(self, leaf: LeafId) -> int | None:
        """Give a new leaf a slot, by eviction if need be. None if there is no slot at all."""
        assert leaf not in self._slots
        if self._free:
            slot = self._free.pop()
        elif self._used < self.granted:
            slot, self._used = self._used, self._used + 1
        elif self._slots:
            _, slot = self._slots.popitem(last=False)
        else:
            return None
        self._slots[leaf] = slot
        return slot

    def drop(self, leaf: LeafId) -> None:
        """Free the slot of a leaf that turned out to be damaged."""
        self._free.append(self._slots.pop(leaf))


class LeafCache:
    """The files of one run. Opened at the first use: a volunteer that trains nothing has none."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self._content_path = folder / "leaves"
        self._index_path = folder / "leaves.index"
        self.capacity = budget_bytes // LEAF_BYTES
        """Most leaves that it may hold."""
        self._slots = SlotTable(0)
        self._lock = threading.Lock()
        self._files: tuple[int, int] | None = None

    def holds(self, leaf: LeafId) -> bool:
        """Whether the leaf is there, unless it turns out to be damaged. Does not block once the
        cache is open."""
        return leaf in self._slots

    def open(self) -> None:
        """Take up what is there from the last start. StorageError when the disk refuses."""
        with self._lock:
            if self._files is None:
                try:
                    self._files = self._opened()
                except OSError as error:
                    raise storage_error(self._content_path, error) from error

    def _opened(self) -> tuple[int, int]:
        make_folder(self._content_path.parent)
        flags = os.O_RDWR | os.O_CREAT
        content, index = (
            os.open(path, flags, 0o644) for path in (self._content_path, self._index_path)
        )
        # A smaller budget than at the last start takes effect now.
        kept_bytes = min(os.fstat(index).st_size, self.capacity * _RECORD.size)
        records = os.pread(index, kept_bytes, 0)
        count = len(records) // _RECORD.size
        os.ftruncate(index, count * _RECORD.size)
        os.ftruncate(content, count * LEAF_BYTES)
        self._slots = SlotTable(count)
        for slot in range(count):
            record = records[slot * _RECORD.size : (slot + 1) * _RECORD.size]
            shard, leaf, size, _ = _RECORD.unpack(record)
            known = LeafId(shard, leaf) if 0 < size <= LEAF_BYTES else None
            self._slots.restore(slot, known)
        return content, index

    def growth_bytes(self) -> int:
        """Bytes that the cache wants to take now; 0 while it has free slots or is at its budget."""
        if not self._slots.is_full:
            return 0
        return min(GROWTH_BYTES, (self.capacity - self._slots.granted) * LEAF_BYTES)

    def grow(self, size_bytes: int) -> None:
        with self._lock:
            self._slots.granted += size_bytes // LEAF_BYTES

    def stop_growing(self) -> None:
        """Stay at the present size until the next start: the disk has no more space for it."""
        self.capacity = self._slots.granted

    def read(self, leaves: Sequence[LeafId]) -> dict[LeafId, bytes]:
        """Return those of the leaves that are there, whole."""
        contents: dict[LeafId, bytes] = {}
        with self._lock:
            for leaf in leaves:
                slot = self._slots.needed(leaf)
                if slot is None:
                    continue
                content = self._read_slot(slot)
                if content is None:
                    self._slots.drop(leaf)
                else:
                    contents[leaf] = content
        return contents

    def _read_slot(self, slot: int) -> bytes | None:
        assert self._files is not None
        content_file, index_file = self._files
        try:
            record = os.pread(index_file, _RECORD.size, slot * _RECORD.size)
            _, _, size, digest = _RECORD.unpack(record)
            content = os.pread(content_file, size, slot * LEAF_BYTES)
        except (OSError, struct.error) as error:
            log.warning("a slot of %s cannot be read: %s", self._content_path, error)
            return None
        return content if size and hash_leaf(content) == digest else None

    def write(self, leaves: Sequence[tuple[LeafId, bytes]]) -> None:
        """Keep verified leaves, as far as there is room. StorageError when the disk refuses."""
        with self._lock:
            if self._files is None:
                return
            for leaf, content in leaves:
                if self._slots.needed(leaf) is not None:
                    continue
                slot = self._slots.place(leaf)
                if slot is None:
                    return
                try:
                    self._write_slot(slot, leaf, content)
                except OSError as error:
                    self._slots.drop(leaf)
                    raise storage_error(self._content_path, error) from error

    def _write_slot(self, slot: int, leaf: LeafId, content: bytes) -> None:
        assert self._files is not None
        content_file, index_file = self._files
        record = _RECORD.pack(leaf.shard, leaf.leaf, len(content), hash_leaf(content))
        _write_at(content_file, slot * LEAF_BYTES, content)
        _write_at(index_file, slot * _RECORD.size, record)

    def close(self) -> None:
        """Close the files; the leaves stay."""
        with self._lock:
            for file in self._files or ():
                os.close(file)
            self._files, self._slots = None, SlotTable(0)


def _write_at(file: int, offset: int, content: bytes) -> None:
    if os.pwrite(file, content, offset) != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
