"""The download of a stage's state: what is refused, and what is shown of its progress."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kits.client.held_stage import member_of
from kits.members import peer_record
from kits.peer_names import named
from kits.swarm_world.facts import Options, manifest_of
from swarm_client.machine.devices import Device
from swarm_client.machine.home import Home
from swarm_client.stage.handle.worker_handle import StageWorker
from swarm_client.volunteer import stage_loader
from swarm_client.volunteer.base_files import BaseFiles, base_state
from swarm_client.volunteer.context import VolunteerOptions
from swarm_client.volunteer.snapshots import SnapshotStore
from swarm_client.volunteer.stage_loader import StageLoader, check_file_size
from swarm_shared.base.errors import NetworkError, ProtocolError
from swarm_shared.base.types import RunId, StageIndex
from swarm_shared.identity.keys import Identity
from swarm_shared.network import open_node
from swarm_shared.protocol import AssignStage
from swarm_shared.run.manifest import InitialState, Manifest
from swarm_shared.run.model_config import AdapterConfig
from swarm_shared.scheduling.placement.stage_sizes import MAX_STATE_HEADER_BYTES, stage_sizes
from swarm_shared.transfer import download_meter
from swarm_shared.transfer.download_meter import DownloadProgress
from swarm_shared.transfer.source import TransferSource
from swarm_shared.transfer.transfer import serve_transfers

RUN = RunId("ab" * 32)
NO_COORDINATOR = TransferSource(named("Lord"), ())


FIRST = InitialState(bytes=5, sha256="a" * 64)
FRESH = AssignStage(stage=1, version=0, source="fresh")


def beginning_with(size: int, sha256: str = "b" * 64) -> Manifest:
    """The manifest of a run with a file of this size for the beginning of stage 1."""
    initial = (FIRST, InitialState(bytes=size, sha256=sha256))
    return manifest_of(Options()).model_copy(update={"initial": initial})


def file_of(version: int, size: int, sha256: str = "b" * 64, **more: Any) -> AssignStage:
    """An assignment of stage 1 with a file of its state."""
    return AssignStage(
        stage=1, version=version, source="snapshot", item="x", bytes=size, sha256=sha256, **more
    )


@pytest.mark.parametrize("surplus", [-1, MAX_STATE_HEADER_BYTES + 1, 6 << 30])
def test_a_file_that_cannot_be_the_state_of_the_stage_is_not_fetched(surplus: int) -> None:
    manifest = manifest_of(Options())
    size = stage_sizes(manifest)[1].state_bytes
    check_file_size(manifest, file_of(3, size))
    with pytest.raises(ProtocolError, match="another source is needed"):
        check_file_size(manifest, file_of(3, size + surplus))


def test_version_0_of_a_run_with_a_beginning_is_the_file_that_the_manifest_names() -> None:
    sizes = stage_sizes(manifest_of(Options()))[1]
    size = sizes.parameter_bytes
    manifest = beginning_with(size)
    check_file_size(manifest, file_of(0, size))
    for other in (file_of(0, size, "a" * 64), file_of(0, size + 8)):
        with pytest.raises(ProtocolError, match="not the one that the manifest names"):
            check_file_size(manifest, other)
    check_file_size(manifest, file_of(3, sizes.state_bytes))
    # Nor can a manifest make a volunteer fetch more than the stage's parameters.
    larger = size + MAX_STATE_HEADER_BYTES + 1
    with pytest.raises(ProtocolError, match="another source is needed"):
        check_file_size(beginning_with(larger), file_of(0, larger))


async def test_a_run_with_a_beginning_starts_at_no_parameters_from_the_seed(tmp_path: Path) -> None:
    manifest = beginning_with(7)
    snapshots = SnapshotStore(Home.create(tmp_path / "home"), RUN, lambda _: None)
    loader = StageLoader(
        cast(Any, 0), member_of(RUN, manifest), snapshots, cast(Any, 0), NO_COORDINATOR
    )
    for is_fresh in (True, False):
        with pytest.raises(ProtocolError, match="the manifest has a file of version 0"):
            await loader.load(cast(StageWorker, Loaded()), FRESH, is_fresh=is_fresh)


class Loaded:
    """The worker that takes the state."""

    def __init__(self) -> None:
        self.content = b""

    async def load_state(self, path: Path, _version: int) -> str:
        self.content = path.read_bytes()
        return "its digest"


async def test_a_download_shows_its_progress_while_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_meter, "LINE_SECONDS", 0.0)
    manifest = manifest_of(Options())
    content = bytes(stage_sizes(manifest)[1].state_bytes)
    (tmp_path / "state").write_bytes(content)
    async with (
        open_node(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"]) as holder,
        open_node(Identity.generate()) as node,
    ):
        serve_transfers(holder, lambda item, _: tmp_path / "state", lambda remote, hello: None)
        record = peer_record(holder.peer_id, 1, addresses=holder.addresses)
        sha256 = hashlib.sha256(content).hexdigest()
        assignment = file_of(3, len(content), sha256, holders=(record,))
        lines: list[str] = []
        shown: list[DownloadProgress | None] = []

        def report(line: str) -> None:
            lines.append(line)
            shown.append(loader.download)

        snapshots = SnapshotStore(Home.create(tmp_path / "home"), RUN, lambda _: None)
        snapshots.clear()
        context = SimpleNamespace(node=node, report=report, claim_disk=lambda size_bytes: None)
        loader = StageLoader(
            cast(Any, context), member_of(RUN, manifest), snapshots, cast(Any, 0), NO_COORDINATOR
        )
        worker = Loaded()
        digest = await loader.load(cast(StageWorker, worker), assignment, is_fresh=True)
    assert (digest, worker.content) == ("its digest", content)
    *during, last = lines
    assert during[0].startswith("downloading stage 1: 0 B of ")
    assert during[-1].startswith("downloading stage 1: ")
    assert "(100 %)" in during[-1]
    assert last.startswith("downloaded ")
    assert last.endswith("of state from 1 peer(s) in 0 s")
    assert all(progress is not None for progress in shown[:-1])
    assert shown[-1] is None


def adapter_manifest(content: bytes, surplus: int = 0) -> Manifest:
    """A run that trains adapters; `content` is the file of stage 1's frozen parameters."""
    manifest = manifest_of(Options())
    model = manifest.model.model_copy(update={"adapters": AdapterConfig(rank=1)})
    manifest = manifest.model_copy(update={"model": model})
    size = stage_sizes(manifest)[1].frozen_bytes + surplus
    state = InitialState(bytes=size, sha256=hashlib.sha256(content).hexdigest())
    return manifest.model_copy(update={"initial": (FIRST, state)})


class Workers:
    """Takes the place of `open_worker`; remembers the content of each base."""

    def __init__(self) -> None:
        self.bases: list[bytes | None] = []

    @asynccontextmanager
    async def open(self, *_: object, base_path: Path | None, **__: object) -> AsyncIterator[Any]:
        self.bases.append(None if base_path is None else base_path.read_bytes())
        yield SimpleNamespace(configured=SimpleNamespace(digest="of the seed"))


async def test_a_worker_starts_with_what_is_frozen_which_is_fetched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(stage_sizes(adapter_manifest(b""))[1].frozen_bytes)
    manifest, workers = adapter_manifest(content), Workers()
    monkeypatch.setattr(stage_loader, "open_worker", workers.open)
    monkeypatch.setattr(stage_loader, "worker_allowance", lambda *_: 0)
    monkeypatch.setattr(stage_loader, "graph_budget", lambda *_: 0)
    (tmp_path / "base").write_bytes(content)
    asked: list[str] = []

    def find(item: str, _: object) -> Path:
        asked.append(item)
        return tmp_path / "base"

    async with (
        open_node(Identity.generate(), ["/ip4/127.0.0.1/tcp/0"]) as organiser,
        open_node(Identity.generate()) as node,
    ):
        serve_transfers(organiser, find, lambda remote, hello: None)
        home = Home.create(tmp_path / "home")
        device = Device("cpu", "CPU", 2**30)
        context = SimpleNamespace(
            node=node, report=lambda line: None, claim_disk=lambda size_bytes: None, home=home,
            options=VolunteerOptions(device, 1, None, None),
        )  # fmt: skip

        def loader_of(manifest: Manifest) -> StageLoader:
            """That of a process which starts now."""
            snapshots = SnapshotStore(home, RUN, lambda _: None)
            snapshots.clear()
            return StageLoader(
                cast(Any, context), member_of(RUN, manifest), snapshots,
                cast(Any, SimpleNamespace(process=lambda: None)),
                TransferSource(organiser.peer_id, organiser.addresses),
            )  # fmt: skip

        for times in (1, 1, 2):
            loader = loader_of(manifest)
            async with loader.open_worker(StageIndex(1)) as worker:
                assert await loader.load(worker, FRESH, is_fresh=True) == "of the seed"
            assert set(asked) == {"initial/1"}
            assert asked.count("initial/1") == times
            if times == 1 and len(workers.bases) == 2:
                kept = home.state_folder(RUN) / "base-1.safetensors"
                kept.write_bytes(b"damaged")
        (tmp_path / "base").write_bytes(bytes([1]) * len(content))
        (home.state_folder(RUN) / "base-1.safetensors").unlink()
        with pytest.raises(NetworkError):
            async with loader_of(manifest).open_worker(StageIndex(1)):
                pytest.fail("a worker has a base with another hash")
    assert workers.bases == [content] * 3


def test_a_file_that_cannot_be_the_base_of_the_stage_is_not_fetched() -> None:
    assert base_state(manifest_of(Options()), StageIndex(1)) is None
    manifest = adapter_manifest(b"x")
    assert base_state(manifest, StageIndex(1)) == manifest.initial[1]
    for surplus in (-1, MAX_STATE_HEADER_BYTES + 1):
        with pytest.raises(ProtocolError, match="the frozen parameters of stage 1 have"):
            base_state(adapter_manifest(b"x", surplus), StageIndex(1))


def test_the_bases_of_two_stages_are_kept(tmp_path: Path) -> None:
    bases = BaseFiles(tmp_path)
    for stage in range(4):
        bases.make_room()
        path = bases.path(StageIndex(stage))
        path.write_bytes(b"x")
        os.utime(path, (stage, stage))
    assert {path.name for path in tmp_path.iterdir()} == {
        "base-2.safetensors", "base-3.safetensors",
    }  # fmt: skip
