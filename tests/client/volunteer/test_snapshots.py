"""Snapshots on the disk of a volunteer: how many, and how much of the disk they take."""

from __future__ import annotations

from pathlib import Path

import pytest

from kits.client.held_stage import held_stage
from swarm_client.machine.home import Home, snapshot_item
from swarm_client.pipeline.held_stage import Holding
from swarm_client.volunteer.snapshots import SnapshotStore
from swarm_shared.base.errors import StorageError
from swarm_shared.base.types import PeerId, RunId, StageIndex, Version
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import SaveSnapshot

RUN = RunId("ab" * 32)
STAGE = StageIndex(1)
ANYONE = PeerId("12D3KooWPeerOfThisTestThatFetches")
STATE_BYTES = 5


class Disk:
    """The bytes that may still be written, and a worker that writes its state."""

    def __init__(self, free_bytes: int) -> None:
        self.state_bytes = STATE_BYTES
        self.free_bytes = free_bytes
        self.present: list[int] = []
        """Files that were there before each snapshot was written."""

    def claim(self, size_bytes: int) -> None:
        if size_bytes > self.free_bytes:
            raise StorageError("the disk is full")
        self.free_bytes -= size_bytes

    async def save_state(self, path: Path, version: Version) -> None:
        self.present.append(len(list(path.parent.glob("*.safetensors"))))
        path.write_bytes(bytes([version]) * STATE_BYTES)


def held_at(disk: Disk, version: int) -> Holding:
    holding = held_stage(Identity.generate(), disk, STAGE)
    holding.account.version = Version(version)
    return holding


def order(version: int) -> SaveSnapshot:
    return SaveSnapshot(version=Version(version), stage=STAGE)


async def test_a_snapshot_that_the_disk_may_not_hold_is_not_written(tmp_path: Path) -> None:
    """Whatever the coordinator asks for, the space that a user wants to keep stays free."""
    disk = Disk(free_bytes=STATE_BYTES)
    store = SnapshotStore(Home.create(tmp_path), RUN, disk.claim)
    store.clear()
    await store.save(held_at(disk, 1), order(1))
    await store.save(held_at(disk, 1), order(1))  # it is there already
    with pytest.raises(StorageError, match="the disk is full"):
        await store.save(held_at(disk, 2), order(2))
    assert disk.present == [0]
    assert store.find(snapshot_item(Version(1), STAGE), ANYONE) is not None


async def test_two_snapshots_are_kept_and_no_third_one_is_written_beside_them(
    tmp_path: Path,
) -> None:
    disk = Disk(free_bytes=1000)
    store = SnapshotStore(Home.create(tmp_path), RUN, disk.claim)
    store.clear()
    for version in (1, 2, 3):
        await store.save(held_at(disk, version), order(version))
    assert disk.present == [0, 1, 1]
    found = [store.find(snapshot_item(Version(v), STAGE), ANYONE) for v in (1, 2, 3)]
    assert [path and path.read_bytes()[0] for path in found] == [None, 2, 3]
