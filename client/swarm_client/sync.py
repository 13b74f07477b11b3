"""State and data that move as files: stage snapshots in and out, token shards in.

A newcomer's stage comes from replicas (bitwise equal, so any of them can serve any chunk) or from
the coordinator's checkpoint; what this peer serves are snapshots it was asked to write. Every
file is verified against a hash that came from the coordinator or the signed manifest.
"""

from __future__ import annotations

import hashlib
import logging
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import trio

from swarm_client import faults
from swarm_client.engine.holding import Holding
from swarm_client.faults import Phase
from swarm_client.home import Home, snapshot_item
from swarm_shared.data.sampler import heldout_microbatch, microbatch
from swarm_shared.data.shards import open_shards, verify_shard
from swarm_shared.errors import DataError, StorageError, SwarmError
from swarm_shared.manifest import Manifest, ShardInfo
from swarm_shared.messages import AssignStage, SaveSnapshot, SnapshotFailed, SnapshotReady
from swarm_shared.model_config import FrozenModel
from swarm_shared.network import Node
from swarm_shared.transfer import Source, fetch
from swarm_shared.types import MicrobatchIndex, PeerId, RunId, Step

log = logging.getLogger(__name__)

KEPT_SNAPSHOTS = 2
"""Newcomers and checkpoints fetch the newest; one older may still be in the middle of a fetch."""

DOWNLOAD_SECONDS = 30.0
"""An HTTP server that sends nothing for so long is given up, and the coordinator asked."""


class Snapshots:
    """The stage snapshots in this volunteer's folder, and their place in the catalogue."""

    def __init__(self, home: Home, run: RunId) -> None:
        self._folder = home.state_folder(run)
        self._served: dict[str, Path] = {}

    def clear(self) -> None:
        """Forget older snapshots: they belong to another process's life."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob("*.safetensors*"):
            path.unlink(missing_ok=True)

    def forget(self) -> None:
        """A new assignment: after a roll-back the same version means another history's state."""
        while self._served:
            _, path = self._served.popitem()
            path.unlink(missing_ok=True)

    def find(self, item: str, _remote: PeerId) -> Path | None:
        return self._served.get(item)

    async def save(
        self, holding: Holding, request: SaveSnapshot, send: Callable[[FrozenModel], None]
    ) -> None:
        """Write the state at the version asked for and say where it is."""
        item = snapshot_item(request.version, request.stage)
        try:
            if holding.stage != request.stage or holding.version != request.version:
                raise StorageError(f"this peer is at version {holding.version} by now")
            path = self._folder / f"{request.version:08d}-{request.stage}.safetensors"
            if item not in self._served:
                await holding.worker.save_state(path, request.version)
            digest, size = await trio.to_thread.run_sync(_hash_file, path)
        except SwarmError as error:
            send(
                SnapshotFailed(
                    version=request.version, stage=request.stage, reason=str(error)[:500]
                )
            )
            return
        faults.cut(Phase.CHECKPOINT, request.version)
        faults.spoil_file(Phase.CHECKPOINT, request.version, path)
        self._served[item] = path
        while len(self._served) > KEPT_SNAPSHOTS:
            oldest = next(iter(self._served))
            self._served.pop(oldest).unlink(missing_ok=True)
        send(
            SnapshotReady(
                version=request.version, stage=request.stage, item=item, bytes=size, sha256=digest
            )
        )

    async def fetch(
        self, node: Node, assignment: AssignStage, certificate: str, run: RunId,
        progress: Callable[[int, int], None],
    ) -> Path:  # fmt: skip
        """Download the assigned snapshot from its holders; the path of the verified file."""
        path = self._folder / f"fetched-{assignment.version:08d}-{assignment.stage}.safetensors"
        await fetch(
            node,
            [Source(holder.peer, holder.addresses) for holder in assignment.holders],
            assignment.item,
            assignment.bytes,
            assignment.sha256,
            path,
            certificate,
            run,
            progress,
        )
        return path


def _hash_file(path: Path) -> tuple[str, int]:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error


async def fetch_data(
    node: Node,
    home: Home,
    run: RunId,
    manifest: Manifest,
    coordinator: Source,
    certificate: str,
    claim_disk: Callable[[int], None] = lambda size_bytes: None,
    *,
    use_urls: bool = True,
    turn: trio.Lock | None = None,
) -> Path:
    """Bring the run's token shards into the volunteer's folder, verified; the folder.

    A shard with a URL is fetched from there first, if `use_urls`, and from the coordinator when
    that fails. `claim_disk` is told of what will be needed and raises when it may not be. Who
    shares a `turn`, as the devices of a machine do, fills their one folder one after the other.
    """
    async with turn or trio.Lock():
        folder = home.data_folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        missing = [shard for shard in manifest.data.shards if not (folder / shard.name).exists()]
        claim_disk(sum(shard.tokens * manifest.data.token_bytes for shard in missing))
        for shard in manifest.data.shards:
            path = folder / shard.name
            if path.exists():
                try:
                    await trio.to_thread.run_sync(_verify, path, shard, manifest)
                    continue
                except DataError as error:
                    log.warning("%s; it is fetched again", error)
                    path.unlink()
            by_url = use_urls and shard.url is not None
            if not by_url or not await _fetch_url(path, shard, manifest):
                size = shard.tokens * manifest.data.token_bytes
                await fetch(
                    node, [coordinator], f"data/{shard.name}", size, shard.sha256, path,
                    certificate, run,
                )  # fmt: skip
            await trio.to_thread.run_sync(_verify, path, shard, manifest)
        return folder


def _verify(path: Path, shard: ShardInfo, manifest: Manifest) -> None:
    verify_shard(path, shard, manifest.data.token_bytes, manifest.model.vocabulary_size)


async def _fetch_url(path: Path, shard: ShardInfo, manifest: Manifest) -> bool:
    size = shard.tokens * manifest.data.token_bytes
    try:
        await trio.to_thread.run_sync(_download, shard.url, path, size)
        await trio.to_thread.run_sync(_verify, path, shard, manifest)
        return True
    except (OSError, ValueError, DataError) as error:
        log.warning("%s could not be had from %s: %s", shard.name, shard.url, error)
        path.unlink(missing_ok=True)
        return False


def _download(url: str, path: Path, size_bytes: int) -> None:
    if not url.startswith(("http://", "https://")):
        raise ValueError("only http and https addresses are followed")
    part = path.with_suffix(".download")
    with urllib.request.urlopen(url, timeout=DOWNLOAD_SECONDS) as answer, part.open("wb") as file:
        left = size_bytes
        while left > 0 and (piece := answer.read(min(left, 2**20))):
            file.write(piece)
            left -= len(piece)
        if left or answer.read(1):
            raise ValueError("it has another size than the manifest says")
    part.replace(path)


class RunSamples:
    """Token ids of the run's microbatches, from the shards in the volunteer's folder."""

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        self._manifest = manifest
        self._train = open_shards(folder, manifest.data, "train")
        self._heldout = open_shards(folder, manifest.data, "heldout")

    def training(
        self, step: Step, microbatch_index: MicrobatchIndex
    ) -> tuple[np.ndarray, np.ndarray]:
        return microbatch(self._train, self._manifest, step, microbatch_index)

    def heldout(self, index: MicrobatchIndex) -> tuple[np.ndarray, np.ndarray]:
        return heldout_microbatch(self._heldout, self._manifest, index)
