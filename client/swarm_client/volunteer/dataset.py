"""Download of the run's token shards into the volunteer's folder, each verified by its hash."""

from __future__ import annotations

import logging
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path

import trio

from swarm_client.machine.home import Home
from swarm_shared.base.atomic_file import make_folder, sync_folder
from swarm_shared.base.errors import DataError
from swarm_shared.base.types import RunId
from swarm_shared.data.shards import verify_shard
from swarm_shared.network import Node
from swarm_shared.run.manifest import Manifest, ShardInfo
from swarm_shared.transfer.transfer import TransferSource, fetch

log = logging.getLogger(__name__)

DOWNLOAD_STALL_SECONDS = 30.0
"""Seconds without data after which an HTTP download is abandoned; the shard is then fetched from
the coordinator."""


async def fetch_data(
    node: Node,
    home: Home,
    run: RunId,
    manifest: Manifest,
    coordinator: TransferSource,
    certificate: str,
    claim_disk: Callable[[int], None] = lambda size_bytes: None,
    *,
    use_urls: bool = True,
    lock: trio.Lock | None = None,
) -> Path:
    """Download and verify the run's token shards; return their folder.

    A shard with a URL is fetched from there first, if `use_urls`, and from the coordinator when
    that fails. `claim_disk` is called with the number of bytes needed and raises when they are not
    allowed. Devices of one machine share one folder and pass a common `lock`, so that one of them
    fills it at a time.
    """
    async with lock or trio.Lock():
        folder = home.data_folder(run)
        make_folder(folder)
        missing = [shard for shard in manifest.data.shards if not (folder / shard.name).exists()]
        claim_disk(sum(shard.tokens * manifest.data.token_bytes for shard in missing))
        for shard in manifest.data.shards:
            path = folder / shard.name
            if path.exists():
                try:
                    await trio.to_thread.run_sync(_verify, path, shard, manifest)
                    continue
                except DataError as error:
                    log.warning("%s; fetching it again", error)
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
        log.warning("%s could not be downloaded from %s: %s", shard.name, shard.url, error)
        path.unlink(missing_ok=True)
        return False


def _download(url: str, path: Path, size_bytes: int) -> None:
    if not url.startswith(("http://", "https://")):
        raise ValueError("only http and https addresses are followed")
    part = path.with_suffix(".download")
    with (
        urllib.request.urlopen(url, timeout=DOWNLOAD_STALL_SECONDS) as answer,
        part.open("wb") as file,
    ):
        left = size_bytes
        while left > 0 and (piece := answer.read(min(left, 2**20))):
            file.write(piece)
            left -= len(piece)
        if left or answer.read(1):
            raise ValueError("its size differs from the manifest's")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)
