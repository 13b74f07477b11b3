from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from swarm_shared.base.atomic_file import (
    PRIVATE_MODE,
    atomic_file,
    make_folder,
    storage_error,
    write_atomically,
)
from swarm_shared.base.errors import StorageError


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_content_and_mode_are_as_asked(tmp_path: Path):
    public, private = tmp_path / "a file", tmp_path / "key"
    write_atomically(public, b"one")
    write_atomically(private, b"two", PRIVATE_MODE)
    assert (public.read_bytes(), mode_of(public)) == (b"one", 0o644)
    assert (private.read_bytes(), mode_of(private)) == (b"two", 0o600)


def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path: Path):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("failure", [ValueError("mine"), KeyboardInterrupt()])
def test_a_failure_half_way_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, failure: BaseException
):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail_half_way() -> None:
        with atomic_file(path) as file:
            file.write(b"half")
            raise failure

    with pytest.raises(type(failure)):
        fail_half_way()
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_write_that_the_system_refuses_is_one_sentence_and_loses_nothing(
    tmp_path: Path, files_no_larger_than
):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    with (
        files_no_larger_than(64 * 1024),
        pytest.raises(StorageError, match="larger than this file system allows"),
    ):
        write_atomically(path, bytes(100_000))
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_missing_folder_is_named(tmp_path: Path):
    path = tmp_path / "gone" / "file"
    with pytest.raises(StorageError, match="gone/file: that folder does not exist"):
        write_atomically(path, b"")


def test_a_folder_in_the_place_of_the_file_is_refused(tmp_path: Path):
    (tmp_path / "file").mkdir()
    with pytest.raises(StorageError, match="there is a folder of that name"):
        write_atomically(tmp_path / "file", b"")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_folder_is_made_with_its_parents_and_one_that_exists_is_left_as_it_is(tmp_path: Path):
    folder = tmp_path / "a" / "b"
    for mode in (0o700, 0o500):
        make_folder(folder, mode)
        assert mode_of(folder) == 0o700


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EACCES, "you may not write there"),
        (errno.EROFS, "read-only"),
        (errno.EXDEV, "Invalid cross-device link; check the disk"),
    ],
)
def test_what_the_system_says_becomes_advice(code: int, words: str):
    error = storage_error(Path("state"), OSError(code, os.strerror(code)))
    assert words in str(error)
    assert str(error).startswith("cannot write state: ")
