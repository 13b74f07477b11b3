"""Small JSON documents in the home, each a file of its own. The only functions here touch the
disk."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from swarm_shared.base.atomic_file import PUBLIC_MODE, write_atomically
from swarm_shared.base.errors import StorageError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.json_messages import first_error

MAX_BYTES = 2**20
"""Longest file that is read; a longer one is none of these documents."""

DocumentT = TypeVar("DocumentT", bound=FrozenModel)


def read_document(path: Path, empty: DocumentT, remedy: str = "move the file away") -> DocumentT:
    """The stored document; `empty` if there is no file. StorageError for one that cannot be
    parsed."""
    try:
        with path.open("rb") as file:
            return type(empty).model_validate_json(file.read(MAX_BYTES + 1))
    except FileNotFoundError:
        return empty
    except OSError as error:
        raise unreadable(path, error) from error
    except ValidationError as error:
        raise StorageError(
            f"{path} cannot be read ({first_error(error)}): it is damaged or of a newer version; "
            f"install that version again, or {remedy}"
        ) from error


def unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path} cannot be read: {error.strerror}; change its permissions, or give another folder "
        "with --home"
    )


def write_document(path: Path, document: FrozenModel, mode: int = PUBLIC_MODE) -> None:
    write_atomically(path, document.model_dump_json(indent=1).encode() + b"\n", mode)
