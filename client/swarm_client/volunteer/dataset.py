"""Download of the run's token shards into the volunteer's folder, each verified by its hash."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import anyio.to_thread
import trio

from swarm_client.connectivity.web_download import STALL_SECONDS, WebClient
from swarm_client.machine.home import Home
from swarm_shared.base.atomic_file import make_folder, sync_folder
from swarm_shared.base.errors import DataError
from swarm_shared.base.types import RunId
from swarm_shared.data.shards import verify_shard
from swarm_shared.network import Node
from swarm_shared.run.manifest import Manifest, ShardInfo
from swarm_shared.transfer.transfer import TransferSource, fetch

log = logging.getLogger(__name__)

LEAST_BYTES_PER_SECOND = 16 * 1024
"""Mean rate of a web server below which a download is abandoned, so that one byte at a time does
not keep a volunteer from joining. The shard is then fetched from the coordinator."""


async def fetch_data(
    node: Node,
    home: Home,
    run: RunId,
    manifest: Manifest,
    coordinator: TransferSource,
    certificate: str,
    claim_disk: Callable[[int], None] = lambda size_bytes: None,
    *,
    web: WebClient | None,
    lock: trio.Lock | None = None,
) -> Path:
    """Download and verify the run's token shards; return their folder.

    A shard with a URL is fetched from there first, if there is a `web` client, and from the
    coordinator when that fails. `claim_disk` is called with the number of bytes needed and raises
    when they are not allowed. Devices of one machine share one folder and pass a common `lock`, so
    that one of them fills it at a time.
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
            if web is None or not await _fetch_url(web, path, shard, manifest):
                size = shard.tokens * manifest.data.token_bytes
                await fetch(
                    node, [coordinator], f"data/{shard.name}", size, shard.sha256, path,
                    certificate, run,
                )  # fmt: skip
            await trio.to_thread.run_sync(_verify, path, shard, manifest)
        return folder


def _verify(path: Path, shard: ShardInfo, manifest: Manifest) -> None:
    verify_shard(path, shard, manifest.data.token_bytes, manifest.model.vocabulary_size)


async def _fetch_url(web: WebClient, path: Path, shard: ShardInfo, manifest: Manifest) -> bool:
    if shard.url is None:
        return False
    size = shard.tokens * manifest.data.token_bytes
    part = path.with_suffix(".download")
    try:
        with trio.fail_after(STALL_SECONDS + size / LEAST_BYTES_PER_SECOND):
            await anyio.to_thread.run_sync(
                web.download, shard.url, part, size, abandon_on_cancel=True
            )
        await trio.to_thread.run_sync(_verify, part, shard, manifest)
        part.replace(path)
        sync_folder(path.parent)
        return True
    except (OSError, ValueError, DataError, trio.TooSlowError) as error:
        log.warning(
            "%s could not be downloaded from %s: %s",
            shard.name, shard.url, error or "it came too slowly",
        )  # fmt: skip
        part.unlink(missing_ok=True)
        return False
