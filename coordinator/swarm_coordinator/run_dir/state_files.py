"""Files of stages' states: their names, and their verification against size and hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

from swarm_shared.base.errors import StorageError


def stage_file_name(stage: int) -> str:
    return f"stage-{stage}.safetensors"


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_file(path: Path, size_bytes: int, sha256: str) -> None:
    """StorageError if the file cannot be read, or is not the one of this size and hash."""
    try:
        if path.stat().st_size != size_bytes:
            raise StorageError(f"the file {path} is damaged (its size is wrong)")
        digest = file_sha256(path)
    except OSError as error:
        raise StorageError(f"the file {path} cannot be read ({error.strerror})") from error
    if digest != sha256:
        raise StorageError(f"the file {path} is damaged (its hash is wrong)")
