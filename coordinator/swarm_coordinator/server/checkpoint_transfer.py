"""File transfers of the coordinator: the items it serves, and the snapshots it fetches.

Owns the catalogue of TRANSFER_PROTOCOL's files (tokenizer, initial states, stored checkpoints) and
fetching one checkpoint at a time. Not here: chunks and hashes (`swarm_shared.transfer.transfer`),
the folder (`run_dir.checkpoint_files`), and when a checkpoint is made (the core).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import trio
import trio.to_thread

from swarm_coordinator.core.events import CheckpointFailed, CheckpointStored, FetchSnapshot
from swarm_coordinator.run_dir.checkpoint_files import CheckpointFolder
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.run_dir.initial_states import initial_files
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.types import PeerId, RunId, StageIndex, Version
from swarm_shared.network import Node
from swarm_shared.run.manifest import Manifest, initial_item
from swarm_shared.transfer.source import TransferSource
from swarm_shared.transfer.transfer import Catalogue, fetch

log = logging.getLogger(__name__)

TOKENIZER_ITEM = "tokenizer.json"


def catalogue(folder: RunFolder, manifest: Manifest, checkpoints: CheckpointFolder) -> Catalogue:
    """Map item names to files. Only names from the manifest or of a checkpoint are resolved."""
    fixed = {initial_item(n): path for n, path in enumerate(initial_files(folder, manifest))}
    if manifest.data.tokenizer_sha256 is not None:
        fixed[TOKENIZER_ITEM] = folder.tokenizer

    def find(item: str, _peer: PeerId) -> Path | None:
        return fixed.get(item) or checkpoints.path_of(item)

    return find


@dataclass(slots=True)
class CheckpointFetch:
    """A checkpoint being fetched: its arrived stages, and the tasks that fetch the rest."""

    version: Version
    files: dict[StageIndex, tuple[int, str]] = field(default_factory=dict)
    requested: set[StageIndex] = field(default_factory=set)
    scopes: list[trio.CancelScope] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class CheckpointFetcher:
    """Carries out FetchSnapshot: fetches the stages of one version into the run folder."""

    node: Node
    folder: CheckpointFolder
    run: RunId
    stages: int
    certificate: Callable[[], str]
    put: Callable[[CheckpointStored | CheckpointFailed], Awaitable[None]]
    _current: CheckpointFetch | None = None

    def begin(self, command: FetchSnapshot) -> CheckpointFetch:
        """Register a command, in the order of commands. The result is passed to `fetch_stage`.

        Another version, or a stage requested again, means that the core gave up the fetch in
        progress: two fetches must not write the same file.
        """
        version, stage = command.version, command.stage
        current = self._current
        if current is None or current.version != version or stage in current.requested:
            self.cancel()
            current = self._current = CheckpointFetch(version)
        current.requested.add(stage)
        return current

    def cancel(self) -> None:
        """Abandon the checkpoint being fetched."""
        if self._current is not None:
            for scope in self._current.scopes:
                scope.cancel()
            self._current = None

    def is_current(self, version: Version) -> bool:
        """Whether this version is the one being fetched."""
        return self._current is not None and self._current.version == version

    async def fetch_stage(self, command: FetchSnapshot, checkpoint: CheckpointFetch) -> None:
        """Fetch one stage; the last stage to arrive completes the checkpoint."""
        with trio.CancelScope() as scope:
            checkpoint.scopes.append(scope)
            if self._current is not checkpoint:
                return
            try:
                await self._fetch(command, checkpoint)
            except SwarmError as error:
                log.warning("stage %d of checkpoint %d: %s", command.stage, command.version, error)
                if self._current is not checkpoint:
                    return
                self.cancel()
                with trio.CancelScope(shield=True):
                    await _in_thread(self.folder.discard_partial, command.version)
                    await self.put(CheckpointFailed(command.version, str(error)))

    async def _fetch(self, command: FetchSnapshot, checkpoint: CheckpointFetch) -> None:
        path = await _in_thread(self.folder.partial_path, command.version, command.stage)
        await fetch(
            self.node,
            [TransferSource(h.peer, (*h.addresses, *h.local)) for h in command.holders],
            command.item, command.bytes, command.sha256, path, self.certificate(), self.run,
        )  # fmt: skip
        checkpoint.files[command.stage] = (command.bytes, command.sha256)
        if len(checkpoint.files) == self.stages:
            record = await _in_thread(self.folder.complete, checkpoint.version, checkpoint.files)
            await self.put(CheckpointStored(record.version, record.stages))


_in_thread = trio.to_thread.run_sync
"""Not abandoned on cancellation: a half-renamed checkpoint must not race with the next one."""
