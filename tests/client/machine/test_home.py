"""The volunteer's folder: whose it is, and what is in the way in it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from kits.other_user import give_to_another_user
from swarm_client.machine.home import Home
from swarm_client.machine.log_file import write_log
from swarm_shared.base.errors import StorageError


def test_a_folder_of_another_user_is_no_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links in it would lead what is written to files of this user."""
    target = tmp_path / "of this user"
    target.mkdir()
    home = tmp_path / "home"
    home.mkdir()
    (home / "log").symlink_to(target)
    give_to_another_user(home, monkeypatch)
    with pytest.raises(StorageError, match="belongs to another user"):
        Home.create(home)
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("name", ["lock", "log/client.log"])
def test_a_folder_in_the_place_of_a_file_is_reported_in_a_sentence(
    tmp_path: Path, name: str
) -> None:
    home = Home.create(tmp_path / "h")
    (home.path / name).mkdir()
    with pytest.raises(StorageError, match="there is a folder of that name"), home.locked():
        write_log(home)


def test_a_folder_that_cannot_be_locked_is_no_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network's file system without a lock service refuses; another machine may work there."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    home = Home.create(tmp_path / "h")
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with (
        pytest.raises(StorageError, match="has no locks; choose a folder on another"),
        home.locked(),
    ):
        pytest.fail("it is not locked")
