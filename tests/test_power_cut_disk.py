"""The file system of the power-cut tests: what it keeps, what it drops, and that it is one.

The model alone is tested in the unit tier; mounted, as programs see it, in the process tier.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import socket
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kits.power_cut import fuse
from kits.power_cut.disk import PAGE_BYTES, ROOT, Disk, Resize, Write
from kits.power_cut.lab import SYNCED_ONLY, PowerCutDisk, at_every_instant, interrupted
from kits.skip_policy import MAY_SKIP_VARIABLE, may_skip

FILE = stat.S_IFREG | 0o600
FOLDER = stat.S_IFDIR | 0o700

changes = st.lists(
    st.one_of(
        st.builds(
            Write, st.integers(0, 3 * PAGE_BYTES), st.binary(min_size=1, max_size=2 * PAGE_BYTES)
        ),
        st.builds(Resize, st.integers(0, 4 * PAGE_BYTES)),
    ),
    max_size=8,
)


def after(content: bytes, what: list[Write | Resize]) -> bytes:
    """An own account of the file: zeros where it was never written."""
    for change in what:
        if isinstance(change, Resize):
            content = content[: change.size].ljust(change.size, b"\0")
        else:
            end = change.offset + len(change.data)
            padded = content.ljust(change.offset, b"\0")
            content = padded[: change.offset] + change.data + padded[end:]
    return content


def synced_file(disk: Disk, before: list[Write | Resize]) -> int:
    number = disk.make(ROOT, b"file", FILE).number
    for change in before:
        disk.inodes[number].change(change)
    disk.sync(number)
    disk.sync(ROOT)
    return number


@given(changes, changes)
def test_a_cut_leaves_a_file_as_it_was_synced(
    before: list[Write | Resize], later: list[Write | Resize]
) -> None:
    disk = Disk()
    number = synced_file(disk, before)
    for change in later:
        disk.inodes[number].change(change)
    assert bytes(disk.inodes[number].content) == after(b"", [*before, *later])
    disk.cut()
    assert bytes(disk.inodes[number].content) == after(b"", before)


@given(changes, changes, st.integers(0, 2**32))
def test_a_torn_file_consists_of_pages_that_it_had_since_the_sync(
    before: list[Write | Resize], later: list[Write | Resize], seed: int
) -> None:
    disk = Disk()
    number = synced_file(disk, before)
    for change in later:
        disk.inodes[number].change(change)
    disk.cut(seed)
    found = bytes(disk.inodes[number].content)
    moments = [after(after(b"", before), later[:count]) for count in range(len(later) + 1)]
    assert len(found) in {len(moment) for moment in moments}
    for start in range(0, len(found), PAGE_BYTES):
        page = found[start : start + PAGE_BYTES]
        assert page in {
            moment[start : start + PAGE_BYTES].ljust(PAGE_BYTES, b"\0")[: len(page)]
            for moment in moments
        }


def test_a_torn_file_may_have_new_pages_and_old_ones() -> None:
    def torn(seed: int) -> tuple[int, ...]:
        disk = Disk()
        number = synced_file(disk, [Write(0, b"o" * 3 * PAGE_BYTES)])
        disk.inodes[number].change(Write(0, b"n" * 3 * PAGE_BYTES))
        disk.cut(seed)
        return tuple(disk.inodes[number].content[::PAGE_BYTES])

    assert len({torn(seed) for seed in range(200)}) == 2**3


def test_a_name_survives_by_a_sync_of_its_folder_alone() -> None:
    disk = Disk()
    synced, unsynced = (disk.make(ROOT, name, FOLDER).number for name in (b"synced", b"unsynced"))
    disk.sync(ROOT)
    for folder in (synced, unsynced):
        number = disk.make(folder, b"file", FILE).number
        disk.inodes[number].change(Write(0, b"content"))
        disk.sync(number)
    disk.sync(synced)
    disk.cut()
    assert bytes(disk.lookup(synced, b"file").content) == b"content"
    with pytest.raises(FileNotFoundError):
        disk.lookup(unsynced, b"file")


def test_a_synced_name_of_an_unsynced_file_leads_to_an_empty_file() -> None:
    disk = Disk()
    number = disk.make(ROOT, b"new", FILE).number
    disk.inodes[number].change(Write(0, b"content"))
    disk.rename(ROOT, b"new", ROOT, b"name")
    disk.sync(ROOT)
    disk.cut()
    assert bytes(disk.lookup(ROOT, b"name").content) == b""


@pytest.mark.parametrize("seed", range(40))
def test_a_rename_happens_as_one(seed: int) -> None:
    disk = Disk()
    old = disk.make(ROOT, b"name", FILE).number
    disk.sync_everything()
    new = disk.make(ROOT, b"temporary", FILE).number
    disk.rename(ROOT, b"temporary", ROOT, b"name")
    disk.cut(seed)
    assert disk.lookup(ROOT, b"name").number in (old, new)
    if disk.lookup(ROOT, b"name").number == new:
        assert list(disk.inodes[ROOT].names) == [b"name"]


def test_unsynced_names_survive_in_any_part() -> None:
    def left(seed: int) -> frozenset[bytes]:
        disk = Disk()
        for name in (b"a", b"b", b"c"):
            disk.make(ROOT, name, FILE)
        disk.cut(seed)
        return frozenset(disk.inodes[ROOT].names)

    assert len({left(seed) for seed in range(200)}) == 2**3


@pytest.mark.parametrize("seed", range(20))
def test_a_folder_that_moved_has_one_name_after_a_sync_of_where_it_went(seed: int) -> None:
    disk = Disk()
    here, there = (disk.make(ROOT, name, FOLDER).number for name in (b"here", b"there"))
    disk.sync(ROOT)
    disk.make(here, b"moved", FOLDER)
    disk.rename(here, b"moved", there, b"moved")
    disk.sync(there)
    disk.cut(seed)
    assert (disk.inodes[here].names, list(disk.inodes[there].names)) == ({}, [b"moved"])


@pytest.mark.parametrize("seed", range(20))
def test_a_folder_that_moved_twice_has_one_name(seed: int) -> None:
    disk = Disk()
    disk.make(ROOT, b"first", FOLDER)
    disk.sync(ROOT)
    disk.rename(ROOT, b"first", ROOT, b"second")
    disk.rename(ROOT, b"second", ROOT, b"third")
    disk.cut(seed)
    assert len(disk.inodes[ROOT].names) == 1


# ---------------------------------------------------------------- mounted


@pytest.mark.parametrize("user", [0, 1000], ids=["root", "another user"])
def test_a_machine_that_cannot_mount_it_may_skip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, user: int
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(fuse, "DEVICE", tmp_path / "no such device")
    monkeypatch.delenv(MAY_SKIP_VARIABLE, raising=False)
    reason = fuse.why_not_here()
    assert reason is not None
    assert may_skip(reason)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.process
def test_programs_find_what_they_synced_and_nothing_else(disk: PowerCutDisk) -> None:
    root = disk.place
    for name in ("both", "content only", "name only"):
        (root / name).write_bytes(name.encode() * 10_000)
    sync(root / "both")
    sync(root / "content only")
    (root / "content only").rename(root / "renamed")
    disk.cut()
    assert disk.recover().cut_before is not None
    assert list(root.iterdir()) == []

    for name in ("both", "name only"):
        (root / name).write_bytes(name.encode() * 10_000)
    sync(root / "both")
    sync(root)
    (root / "both").open("r+b").write(b"overwritten")
    (root / "afterwards").mkdir()
    disk.cut()
    disk.recover()
    assert sorted(path.name for path in root.iterdir()) == ["both", "name only"]
    assert (root / "both").read_bytes() == b"both" * 10_000
    assert (root / "name only").read_bytes() == b""


@pytest.mark.process
def test_the_mounted_disk_is_a_file_system(disk: PowerCutDisk) -> None:
    root = disk.place
    for number in range(500):
        (root / f"file {number}").touch(0o640)
    assert len(list(root.iterdir())) == 500
    path = root / "file 0"
    with path.open("ab") as file:
        file.write(b"a" * 300_000)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    path.chmod(0o600)
    os.truncate(path, 250_000)
    (root / "second name").hardlink_to(path)
    found = (root / "second name").stat()
    assert (found.st_size, stat.S_IMODE(found.st_mode), found.st_nlink) == (250_000, 0o600, 2)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[100_000:100_003] = b"map"
        mapped.flush()
    assert path.read_bytes()[99_999:100_004] == b"amapa"
    (root / "folder").mkdir()
    (root / "file 1").replace(root / "folder" / "inside")
    with pytest.raises(OSError, match=os.strerror(errno.ENOTEMPTY)):
        (root / "folder").rmdir()
    # Relative, because the path of a socket may have 107 bytes.
    with contextlib.chdir(root), socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        listening.listen()
        with socket.socket(socket.AF_UNIX) as calling:
            calling.connect("socket")


@pytest.mark.process
def test_the_power_is_cut_in_front_of_the_chosen_operation(disk: PowerCutDisk) -> None:
    root = disk.place

    def make() -> None:
        for name in "abc":
            (root / name).mkdir()
            sync(root)

    left = []
    instants = at_every_instant(
        disk, make, lambda ended: left.append((len(list(root.iterdir())), ended))
    )
    assert instants == 7
    assert left == [(n, False) for n in (0, 0, 1, 1, 2, 2)] + [(3, True)]
    assert interrupted(disk, make, 4, SYNCED_ONLY).cut_before == "MKDIR "
