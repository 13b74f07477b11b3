"""Training data by range, between a real node that serves shards and a real node that trains."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing

from kits.client.held_stage import member_of
from kits.members import ORGANISER, certificate
from kits.range_server import range_server
from kits.waiting import until
from shared.data.test_sample_ranges import written
from swarm_client.connectivity.web_download import WebClient
from swarm_client.training_data import fetcher as fetcher_module
from swarm_client.training_data.fetcher import LeafFetcher
from swarm_client.training_data.leaf_cache import LeafCache
from swarm_client.training_data.mirrors import Mirrors
from swarm_client.training_data.run_samples import RunSamples, leaves_of
from swarm_shared.base.errors import NetworkError, StorageError
from swarm_shared.base.types import MicrobatchIndex, RunId, Step
from swarm_shared.data.leaf_files import LeafFiles, ShardSamples
from swarm_shared.data.merkle import LEAF_BYTES
from swarm_shared.data.sample_ranges import LeafId, SampleRanges
from swarm_shared.identity.keys import Identity
from swarm_shared.network import Node, open_node
from swarm_shared.protocol import Lease, LeasedMicrobatch
from swarm_shared.run.manifest import Manifest
from swarm_shared.transfer import download_meter
from swarm_shared.transfer.source import TransferSource
from swarm_shared.transfer.transfer import certificate_check, serve_transfers

RUN = RunId("ab" * 32)


@dataclass
class Organiser:
    """Reads leaves as the coordinator does, and counts them."""

    files: LeafFiles
    proofs: list[LeafId] = field(default_factory=list)
    contents: list[LeafId] = field(default_factory=list)
    damage: Callable[[bytes], bytes] = bytes

    def proof(self, wanted: LeafId) -> bytes:
        self.proofs.append(wanted)
        return self.files.proof(wanted)

    def content(self, wanted: LeafId) -> bytes:
        self.contents.append(wanted)
        return self.damage(self.files.content(wanted))


@dataclass
class World:
    folder: Path
    manifest: Manifest
    organiser: Organiser
    stack: AsyncExitStack
    nursery: trio.Nursery
    holder: Node
    claimed: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """Lines for people."""

    async def fetcher(self, home: Path, budget_leaves: int = 64) -> LeafFetcher:
        identity = Identity.generate()
        shown = certificate(identity.peer_id, RUN)
        node = await self.stack.enter_async_context(open_node(identity, []))
        fetcher = LeafFetcher(
            node, member_of(RUN, self.manifest, shown),
            TransferSource(self.holder.peer_id, self.holder.addresses),
            LeafCache(home, budget_leaves * LEAF_BYTES), self.claimed.append,
            Mirrors(self.manifest, WebClient(allow_private=True)), self.lines.append,
        )  # fmt: skip
        self.nursery.start_soon(fetcher.run)
        return fetcher

    async def samples(self, home: Path, budget_leaves: int = 64) -> RunSamples:
        return RunSamples(self.manifest, await self.fetcher(home, budget_leaves))

    async def check(self, samples: RunSamples, step: int, index: int) -> None:
        """Draw a microbatch: it has the tokens of the shards."""
        found = await samples.drawn(Step(step), MicrobatchIndex(index))
        assert same(found, ShardSamples(self.folder, self.manifest).training(step, index))


@asynccontextmanager
async def world(tmp_path: Path, *mirrors: str) -> AsyncIterator[World]:
    folder = tmp_path / "organiser"
    folder.mkdir(exist_ok=True)
    manifest = written(folder, (30_000, 300_000, 200_000), 2)
    data = manifest.data.model_copy(update={"mirrors": mirrors})
    manifest = manifest.model_copy(update={"data": data})
    organiser = Organiser(LeafFiles(folder, manifest.data))
    async with (
        open_node(ORGANISER, ["/ip4/127.0.0.1/tcp/0"]) as holder,
        trio.open_nursery() as nursery,
    ):
        serve_transfers(
            holder, lambda item, _: None, certificate_check(RUN, ORGANISER.peer_id), organiser
        )
        async with AsyncExitStack() as stack:
            yield World(folder, manifest, organiser, stack, nursery, holder)
        nursery.cancel_scope.cancel()


def same(found: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def lease(step: int, *indices: int) -> Lease:
    leased = tuple(
        LeasedMicrobatch(microbatch=MicrobatchIndex(index), accumulate=()) for index in indices
    )
    return Lease(step=Step(step), lease=1, window=1, microbatches=leased)


def file_of(folder: Path) -> Callable[[str, int, int], bytes]:
    def read(path: str, start: int, count: int) -> bytes:
        file = folder / path.rpartition("/")[2]
        return file.read_bytes()[start : start + count] if file.exists() else b""

    return read


async def test_a_microbatch_has_the_tokens_of_the_shards_and_fetches_its_own_leaves_only(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        samples = await w.samples(tmp_path / "home")
        assert w.organiser.contents == []
        await w.check(samples, 1, 0)
        needed = leaves_of(SampleRanges(w.manifest).training(1, 0))
        assert sorted(w.organiser.contents) == sorted(needed)
        assert not (tmp_path / "home" / "leaves").stat().st_size > 5 * LEAF_BYTES
        found = await samples.drawn(
            Step(1), MicrobatchIndex(w.manifest.training.heldout_microbatches.start + 1)
        )
        assert same(found, ShardSamples(w.folder, w.manifest).heldout(1))


async def test_a_lease_is_fetched_ahead_with_the_forecast_of_the_next_step_and_kept_for_a_restart(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        ranges = SampleRanges(w.manifest)
        samples = await w.samples(tmp_path / "home")
        samples.expect(lease(1, 0, 2))
        needed = leaves_of(
            [one for step in (1, 2) for index in (0, 2) for one in ranges.training(step, index)]
        )
        await until(lambda: len(w.organiser.contents) >= len(needed))
        assert sorted(w.organiser.contents) == sorted(needed)
        for step, index in ((1, 0), (1, 2), (2, 0), (2, 2)):
            await w.check(samples, step, index)
        assert len(w.organiser.contents) == len(needed)
        again = await w.samples(tmp_path / "home")
        await trio.testing.wait_all_tasks_blocked(0.05)
        await w.check(again, 2, 2)
        assert len(w.organiser.contents) == len(needed)


async def test_data_that_is_waited_for_shows_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "SHOWN_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(download_meter, "LINE_SECONDS", 0.0)
    async with world(tmp_path) as w:
        fetching = await w.fetcher(tmp_path / "home")
        samples = RunSamples(w.manifest, fetching)
        leaves = len(leaves_of(SampleRanges(w.manifest).training(1, 0)))
        hold, release = threading.Event(), w.organiser.damage

        def wait(content: bytes) -> bytes:
            assert hold.wait(20)
            return release(content)

        w.organiser.damage = wait
        w.nursery.start_soon(samples.drawn, Step(1), MicrobatchIndex(0))
        await until(lambda: fetching.download is not None and bool(w.organiser.contents))
        download = fetching.download
        assert download is not None
        assert (download.what, download.received_bytes) == ("training data", 0)
        assert download.total_bytes >= leaves * LEAF_BYTES
        hold.set()
        await until(lambda: fetching.download is None)
    assert w.lines[0].startswith("downloading training data: 0 B of ")


async def test_what_was_handed_back_is_not_fetched_ahead(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        samples = await w.samples(tmp_path / "home")
        samples.expect(lease(1, 0, 1, 2))
        samples.clear()
        await samples.drawn(Step(3), MicrobatchIndex(0))
        needed = leaves_of(SampleRanges(w.manifest).training(3, 0))
        assert sorted(w.organiser.contents) == sorted(needed)


@pytest.mark.parametrize("budget_leaves", [0, 1, 3])
async def test_any_budget_is_enough_to_train_and_is_kept(
    tmp_path: Path, budget_leaves: int
) -> None:
    async with world(tmp_path) as w:
        samples = await w.samples(tmp_path / "home", budget_leaves)
        for step in (1, 2, 3):
            samples.expect(lease(step, 0, 1, 2))
            for index in (0, 1, 2):
                await w.check(samples, step, index)
        assert (tmp_path / "home" / "leaves").stat().st_size <= budget_leaves * LEAF_BYTES
        assert sum(w.claimed) == budget_leaves * LEAF_BYTES


async def test_a_disk_without_room_keeps_nothing_and_the_volunteer_trains(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        fetcher = await w.fetcher(tmp_path / "home")

        def refuse(size_bytes: int) -> None:
            raise StorageError("the disk has no room")

        fetcher.claim_disk = refuse
        samples = RunSamples(w.manifest, fetcher)
        await w.check(samples, 1, 0)
        assert fetcher.cache.capacity == 0
        assert (tmp_path / "home" / "leaves").stat().st_size == 0


async def test_with_a_mirror_the_coordinator_sends_proofs_only(tmp_path: Path) -> None:
    with range_server(file_of(tmp_path / "organiser")) as mirror:
        async with world(tmp_path, f"{mirror.url}/data/") as w:
            samples = await w.samples(tmp_path / "home")
            await w.check(samples, 1, 0)
            assert w.organiser.contents == []
            assert w.organiser.proofs
            assert all(path.startswith("/data/train-") for path in mirror.requests)


async def test_a_mirror_of_wrong_bytes_is_asked_once_and_the_coordinator_serves_instead(
    tmp_path: Path,
) -> None:
    with range_server(lambda _, start, count: bytes(count)) as mirror:
        async with world(tmp_path, mirror.url) as w:
            samples = await w.samples(tmp_path / "home")
            await w.check(samples, 1, 0)
            asked = len(mirror.requests)
            await w.check(samples, 2, 0)
            assert asked == len(mirror.requests) > 0


@pytest.mark.parametrize("trouble", [{"status": 503}, {"ranges": False}, {"shift": 1}], ids=str)
async def test_a_mirror_that_fails_rests_and_the_next_one_serves(
    tmp_path: Path, trouble: dict[str, int]
) -> None:
    read = file_of(tmp_path / "organiser")
    with range_server(read) as bad, range_server(read) as good:
        for name, value in trouble.items():
            setattr(bad, name, value)
        async with world(tmp_path, bad.url, good.url) as w:
            samples = await w.samples(tmp_path / "home")
            for step in (1, 2):
                await w.check(samples, step, 0)
            assert good.requests
            assert len(bad.requests) <= len(SampleRanges(w.manifest).training(1, 0))


async def test_mirrors_are_not_asked_while_only_the_own_transport_may_be_used(
    tmp_path: Path,
) -> None:
    with range_server(file_of(tmp_path / "organiser")) as mirror:
        async with world(tmp_path, mirror.url) as w:
            fetcher = await w.fetcher(tmp_path / "home")
            fetcher.use_mirrors = False
            samples = RunSamples(w.manifest, fetcher)
            await w.check(samples, 1, 0)
            assert mirror.requests == []


async def test_a_cut_connection_is_opened_again_and_nothing_that_arrived_is_fetched_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "FIRST_PAUSE_SECONDS", 0.01)
    async with world(tmp_path) as w:
        fetcher = await w.fetcher(tmp_path / "home")
        samples = RunSamples(w.manifest, fetcher)
        await samples.drawn(Step(1), MicrobatchIndex(0))
        before = set(w.organiser.contents)
        await fetcher.node.disconnect(w.holder.peer_id)
        await w.check(samples, 1, 0)
        assert set(w.organiser.contents) == before
        await w.check(samples, 2, 1)


async def test_a_coordinator_of_wrong_bytes_is_an_error_of_the_microbatch_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(fetcher_module, "FIRST_PAUSE_SECONDS", 0.01)
    async with world(tmp_path) as w:
        samples = await w.samples(tmp_path / "home")
        w.organiser.damage = lambda content: bytes(len(content))
        with pytest.raises(NetworkError, match=r"could not be fetched.*not those of the manifest"):
            await samples.drawn(Step(1), MicrobatchIndex(0))
        w.organiser.damage = lambda content: content[:-1]
        with pytest.raises(NetworkError, match="sent leaves of a wrong size"):
            await samples.drawn(Step(1), MicrobatchIndex(0))
        assert (tmp_path / "home" / "leaves").stat().st_size == 0
        w.organiser.damage = bytes
        await w.check(samples, 1, 0)


async def test_a_cut_shard_of_the_organiser_is_one_sentence_at_the_volunteer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "PATIENCE_SECONDS", 0.5)
    async with world(tmp_path) as w:
        samples = await w.samples(tmp_path / "home")
        for shard in w.manifest.data.shards:
            (w.folder / shard.name).write_bytes(b"")
        with pytest.raises(NetworkError, match="shorter than the manifest says; restore it"):
            await samples.drawn(Step(1), MicrobatchIndex(0))
