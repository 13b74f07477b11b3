"""Users without a home folder, as in containers that run as a number."""

from __future__ import annotations

import pwd
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from swarm_client.machine.home import Home
from swarm_client.preferences.layers import preferences_path
from swarm_shared.base.errors import StorageError
from swarm_shared.host.user_folders import (
    data_folder,
    expanded,
    home_folder,
    log_folders,
    settings_folder,
)


def unknown(_: object) -> NoReturn:
    raise KeyError


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(pwd, "getpwnam", unknown)


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize("folder", [data_folder, settings_folder, home_folder])
def test_a_user_without_a_home_folder_learns_what_to_set(folder: Callable[[], Path]) -> None:
    with pytest.raises(StorageError, match="set HOME, or choose the program's folder with --home"):
        folder()
    assert log_folders() == ()


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize("name", ["~/texts", "~of-another-machine/texts"])
def test_a_home_folder_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(StorageError, match=name):
        expanded(Path(name))


@pytest.mark.usefixtures("no_home")
def test_a_folder_that_is_given_is_enough(tmp_path: Path) -> None:
    assert Home.locate(tmp_path).path == tmp_path
    assert preferences_path(tmp_path) == tmp_path / "preferences.toml"


def test_the_folders_of_a_user_are_those_of_the_platform(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert expanded(Path("~/texts")) == home_folder() / "texts" == tmp_path / "texts"
    assert Home.locate(None).path == data_folder()
    assert data_folder().is_relative_to(tmp_path)
    assert preferences_path(data_folder()) == preferences_path(None)
    assert all(folder.is_relative_to(tmp_path) for folder in log_folders())
