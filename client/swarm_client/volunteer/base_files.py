"""The frozen parameters of stages, of a run that trains adapters, in this volunteer's folder.

A file is the one that the signed manifest names for the stage (`Manifest.initial`). It is kept for
the next worker of the stage, also of a later process, and read again before it is used.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import trio

from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.text import size_text
from swarm_shared.base.types import StageIndex
from swarm_shared.run.manifest import InitialState, Manifest
from swarm_shared.scheduling.placement.stage_sizes import is_size_of_state_file, stage_sizes

KEPT_BASES = 2
"""Files kept: that of the held stage, and that of the one which is prepared for a move."""

_PREFIX, _SUFFIX = "base-", ".safetensors"


def is_base_file(path: Path) -> bool:
    """Whether a file of the state folder holds all frozen parameters of a stage."""
    return path.name.startswith(_PREFIX) and path.suffix == _SUFFIX


@dataclass(frozen=True, slots=True)
class BaseFiles:
    """The files in `folder`."""

    folder: Path

    def path(self, stage: StageIndex) -> Path:
        return self.folder / f"{_PREFIX}{stage}{_SUFFIX}"

    async def has(self, stage: StageIndex, state: InitialState) -> bool:
        """Whether the stage's file exists and is undamaged."""
        return await trio.to_thread.run_sync(_has_hash, self.path(stage), state)

    def make_room(self) -> None:
        """Remove the files that were fetched first, so that one more may be fetched."""
        paths = self.folder.glob(f"{_PREFIX}*{_SUFFIX}")
        files = sorted(paths, key=lambda path: path.stat().st_mtime)
        for path in files[: max(0, len(files) + 1 - KEPT_BASES)]:
            path.unlink(missing_ok=True)


def base_state(manifest: Manifest, stage: StageIndex) -> InitialState | None:
    """Return the file of a stage's frozen parameters; None for a run that has none. ProtocolError
    for one that cannot hold them, before any of it is fetched."""
    if not manifest.model.has_adapters or not manifest.initial:
        return None
    state, frozen_bytes = manifest.initial[stage], stage_sizes(manifest)[stage].frozen_bytes
    if not is_size_of_state_file(state.bytes, frozen_bytes):
        raise ProtocolError(
            f"the frozen parameters of stage {stage} have {size_text(frozen_bytes)}, and the "
            f"manifest names a file of {size_text(state.bytes)}; leave this run, or ask the "
            "organiser to make it anew"
        )
    return state


def _has_hash(path: Path, state: InitialState) -> bool:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == state.sha256
    except OSError:
        return False
