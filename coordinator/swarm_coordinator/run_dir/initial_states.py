"""The states of version 0 in the run folder, where a run continues from a given model.

    initial/stage-0.safetensors …     parameters in float32; the optimizer has no state yet

The manifest has their hashes. Owns their paths and their verification; `run_creation` writes them.
"""

from __future__ import annotations

from pathlib import Path

from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.run_dir.state_files import stage_file_name, verify_file
from swarm_shared.base.errors import StorageError
from swarm_shared.run.manifest import Manifest


def initial_files(folder: RunFolder, manifest: Manifest) -> list[Path]:
    """Return the file of every stage; none where the parameters are drawn from the seed."""
    return [folder.initial / stage_file_name(stage) for stage in range(len(manifest.initial))]


def verify_initial_states(folder: RunFolder, manifest: Manifest) -> None:
    """Read and hash every file; StorageError names what is damaged, and what to do."""
    for path, state in zip(initial_files(folder, manifest), manifest.initial, strict=True):
        try:
            verify_file(path, state.bytes, state.sha256)
        except StorageError as error:
            raise StorageError(
                f"{error}; the run begins from it: restore it from a copy, or make a new run"
            ) from error
