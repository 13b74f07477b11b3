"""A run over 1 TB of tokens: the real coordinator over loopback, the real client, little disk.

The shards are sparse. Where the first microbatches lie there are random tokens; all other bytes
are zeros, so that equal leaves and equal shards are hashed once.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import trio

from kits.client.held_stage import member_of
from kits.coordinator.shell_world import client, hello_for, make_run, served
from swarm_client.connectivity.web_download import WebClient
from swarm_client.training_data.fetcher import LeafFetcher
from swarm_client.training_data.leaf_cache import LeafCache
from swarm_client.training_data.mirrors import Mirrors
from swarm_client.training_data.run_samples import RunSamples
from swarm_coordinator.durability.run_files import load_identity, load_manifest
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_shared.base.atomic_file import write_atomically
from swarm_shared.base.types import MicrobatchIndex, Step
from swarm_shared.data.leaf_files import ShardSamples
from swarm_shared.data.merkle import LEAF_BYTES, hash_leaf, root_of, tree_of
from swarm_shared.data.sample_ranges import SampleRange, SampleRanges
from swarm_shared.data.shards import SHARD_TOKENS, tree_path
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signed_manifest import sign_manifest
from swarm_shared.protocol import Lease, LeasedMicrobatch, Welcome
from swarm_shared.run.manifest import Manifest, ShardInfo
from swarm_shared.transfer.source import TransferSource

SHARDS = 932
"""Of 1 GiB: 1.0007 TB."""
LEAVES = 2 * SHARD_TOKENS // LEAF_BYTES
MICROBATCHES = 3


def terabyte(path: Path) -> tuple[RunFolder, Manifest]:
    """A run whose training data is replaced by sparse shards."""
    folder = make_run(
        path, model__sequence_length=2048, training__sequences_per_microbatch=4,
        training__microbatches_per_step=MICROBATCHES,
    )  # fmt: skip
    small = load_manifest(folder)
    zero = hash_leaf(bytes(LEAF_BYTES))
    tree = tree_of([zero] * LEAVES)
    first = folder.data / "zero-00000.tokens"
    with first.open("wb") as file:
        file.truncate(2 * SHARD_TOKENS)
    tree_path(first).write_bytes(tree)
    (heldout,) = small.data.split("heldout")
    content = np.fromfile(folder.data / heldout.name, dtype=np.uint8).astype("<u2").tobytes()
    (folder.data / heldout.name).write_bytes(content)
    held_tree = tree_of(
        [hash_leaf(content[at : at + LEAF_BYTES]) for at in range(0, len(content), LEAF_BYTES)]
    )
    tree_path(folder.data / heldout.name).write_bytes(held_tree)
    shards = [
        ShardInfo(
            name=f"zero-{number:05d}.tokens", split="train", tokens=SHARD_TOKENS,
            merkle_root=root_of(tree),
        )
        for number in range(SHARDS)
    ]  # fmt: skip
    for info in shards[1:]:
        (folder.data / info.name).hardlink_to(first)
        tree_path(folder.data / info.name).hardlink_to(tree_path(first))
    heldout = heldout.model_copy(update={"merkle_root": root_of(held_tree)})
    data = small.data.model_copy(update={"token_bytes": 2, "shards": (*shards, heldout)})
    manifest = small.model_copy(update={"data": data})
    ranges = SampleRanges(manifest)
    found = [one for index in range(MICROBATCHES) for one in ranges.training(1, index)]
    for shard in {one.shard for one in found}:
        mine = [one for one in found if one.shard == shard]
        shards[shard] = _with_tokens(folder.data, shards[shard], mine, zero)
    data = data.model_copy(update={"shards": (*shards, heldout)})
    manifest = manifest.model_copy(update={"data": data})
    write_atomically(folder.manifest, sign_manifest(load_identity(folder), manifest))
    return folder, manifest


def _with_tokens(
    folder: Path, info: ShardInfo, ranges: list[SampleRange], zero: bytes
) -> ShardInfo:
    """A shard of its own, with random tokens at these ranges."""
    path = folder / info.name.replace("zero", "real")
    dice = np.random.default_rng(ranges[0].start)
    with path.open("w+b") as file:
        file.truncate(2 * SHARD_TOKENS)
        for one in ranges:
            file.seek(one.start)
            file.write(dice.integers(0, 256, one.size // 2, dtype=np.uint16).astype("<u2"))
        hashes = [zero] * LEAVES
        for leaf in {leaf.leaf for one in ranges for leaf in one.leaves}:
            file.seek(leaf * LEAF_BYTES)
            hashes[leaf] = hash_leaf(file.read(LEAF_BYTES))
    tree = tree_of(hashes)
    tree_path(path).write_bytes(tree)
    return info.model_copy(update={"name": path.name, "merkle_root": root_of(tree)})


@pytest.mark.process
@pytest.mark.timeout(240)
async def test_a_terabyte_starts_at_once_with_the_bytes_of_its_first_microbatches_on_the_disk(
    tmp_path: Path,
) -> None:
    folder, manifest = terabyte(tmp_path / "run")
    assert sum(shard.tokens for shard in manifest.data.split("train")) * 2 > 10**12
    home = tmp_path / "home"
    async with served(folder) as run, trio.open_nursery() as nursery:
        begun = time.monotonic()
        async with client(run.invite, Identity.generate()) as one:
            await one.send(hello_for(run.invite))
            welcome = await one.receive()
            assert isinstance(welcome, Welcome)
            before = sum(link.received for link in one.node.link_bytes())
            fetcher = LeafFetcher(
                one.node, member_of(run.invite.run_id, manifest, welcome.certificate),
                TransferSource(run.invite.coordinator, run.invite.addresses),
                LeafCache(home, 2**30), lambda size_bytes: None, Mirrors(manifest, WebClient()),
                lambda line: None,
            )  # fmt: skip
            nursery.start_soon(fetcher.run)
            samples = RunSamples(manifest, fetcher)
            leased = tuple(
                LeasedMicrobatch(microbatch=MicrobatchIndex(index), accumulate=())
                for index in range(MICROBATCHES)
            )
            samples.expect(Lease(step=Step(1), lease=1, window=1, microbatches=leased))
            found = [await samples.drawn(Step(1), MicrobatchIndex(0))]
            first_seconds = time.monotonic() - begun
            found += [
                await samples.drawn(Step(1), MicrobatchIndex(index))
                for index in range(1, MICROBATCHES)
            ]
            received = sum(link.received for link in one.node.link_bytes()) - before
            nursery.cancel_scope.cancel()
    from_shards = ShardSamples(folder.data, manifest)
    for index, arrays in enumerate(found):
        expected = from_shards.training(1, index)
        assert all(np.array_equal(*pair) for pair in zip(arrays, expected, strict=True))
        assert arrays[0].any()
    disk_bytes = sum(path.stat().st_blocks * 512 for path in home.iterdir())
    # Two steps of sequences, each in at most two leaves; the second step is the forecast.
    leaves = 2 * 4 * MICROBATCHES * 2
    assert received < leaves * (LEAF_BYTES + 1024)
    assert disk_bytes < leaves * (LEAF_BYTES + 1024)
    size = folder.manifest.stat().st_size
    print(
        f"first microbatch after {first_seconds:.2f} s; {received} bytes received, {disk_bytes} on "
        f"the disk; the signed manifest has {size} bytes"
    )
