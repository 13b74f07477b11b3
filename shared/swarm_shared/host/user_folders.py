"""The platform's folders for a user's files. They need a home folder, which users of containers and
services may lack."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import platformdirs

from swarm_shared.base.errors import StorageError

NAME = "swarmtrain"


def data_folder() -> Path:
    """For identities, caches and logs. StorageError for a user without a home folder."""
    return _folder(platformdirs.user_data_path)


def settings_folder() -> Path:
    """For preferences. StorageError for a user without a home folder."""
    return _folder(platformdirs.user_config_path)


def log_folders() -> tuple[Path, ...]:
    """For tracebacks of unexpected errors: one folder, or none for a user without a home folder."""
    with contextlib.suppress(StorageError):
        return (_folder(platformdirs.user_log_path),)
    return ()


def expanded(path: Path) -> Path:
    """The path as an absolute one, with the home folder for `~`. StorageError for a user without
    one."""
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise StorageError(
            f"{path} names a home folder that is not known; write the whole path"
        ) from error


def home_folder() -> Path:
    """StorageError for a user without one."""
    return _found(Path.home)


def _folder(locate: Callable[..., Path]) -> Path:
    return _found(lambda: locate(NAME, appauthor=False))


def _found(locate: Callable[[], Path]) -> Path:
    try:
        return locate()
    except RuntimeError as error:
        raise StorageError(
            "this user has no home folder; set HOME, or choose the program's folder with --home"
        ) from error
