"""Run folders with a past, made without a coordinator: a database and checkpoints that belong."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import trio

from kits.peer_names import named
from swarm_coordinator.core.events import (
    AppliedStep,
    CheckpointRecord,
    StageShare,
    StepPart,
    StepTimesRecord,
)
from swarm_coordinator.durability.run_files import load_manifest
from swarm_coordinator.run_dir.checkpoint_files import CheckpointFolder
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.connection import DatabaseLocation
from swarm_coordinator.storage.records import Record
from swarm_coordinator.storage.store import Store, open_store
from swarm_shared.base.types import StageIndex, Step, Version
from swarm_shared.identity.signed_manifest import run_id_of

ANNA, BERT = named("KooWAnna"), named("KooWBert")
STAGES, MICROBATCHES = 2, 2


def step(
    number: int, attempt: int = 1, loss: float = 2.0, attempts: tuple[int, ...] = ()
) -> AppliedStep:
    """Every microbatch once in every stage."""
    shares = (
        StageShare(ANNA, StageIndex(0), 1, 16), StageShare(BERT, StageIndex(0), 1, 16),
        StageShare(BERT, StageIndex(1), 2, 32),
    )  # fmt: skip
    return AppliedStep(
        Step(number), attempt, loss + 1 / number, 32, 0.5, math.sqrt(number), 1e-3, shares,
        attempts,
    )  # fmt: skip


def times(number: int) -> StepTimesRecord:
    """Of such a step, whose last member took a quarter of a second to apply it."""
    first, last = StageIndex(0), StageIndex(1)
    parts = (
        StepPart("compute", None, -0.5, -0.25), StepPart("close", None, -0.2, 0.0),
        StepPart("average", first, -0.2, -0.05), StepPart("average", last, -0.1, 0.0),
        StepPart("apply", None, 0.0, 0.25),
        StepPart("apply", first, 0.0, 0.25), StepPart("apply", last, 0.0, 0.125),
    )  # fmt: skip
    return StepTimesRecord(Step(number), parts)


def checkpoints_of(folder: RunFolder, keep: int = 3) -> CheckpointFolder:
    manifest = load_manifest(folder)
    return CheckpointFolder(
        folder.checkpoints, run_id_of(manifest), manifest.stage_count, keep=keep
    )


def put_checkpoint(
    folder: RunFolder, version: int, states: Sequence[bytes] = ()
) -> CheckpointRecord:
    """Its files in the folder, as the coordinator fetches them; the record is for the store.

    `states` are the contents of the files; without them, a text that is no model.
    """
    checkpoints = checkpoints_of(folder)
    files: dict[StageIndex, tuple[int, str]] = {}
    texts = [f"stage {n} at {version};".encode() * 312 for n in range(STAGES)]
    for number, content in enumerate(states or texts):
        checkpoints.partial_path(version, number).write_bytes(content)
        files[StageIndex(number)] = (len(content), hashlib.sha256(content).hexdigest())
    return checkpoints.complete(Version(version), files)


def write(store: Store, *records: Record) -> None:
    async def main() -> None:
        for record in records:
            await store.write(record)

    trio.run(main)


def one_start(folder: RunFolder, *records: Record) -> int:
    """A coordinator that came, wrote this and went; its generation."""
    return one_start_at(folder.database, *records)


def one_start_at(place: DatabaseLocation, *records: Record) -> int:
    """The same at a database, wherever it lies."""
    store = open_store(place)
    try:
        generation = store.next_generation()
        write(store, *records)
    finally:
        store.close()
    return generation


def with_a_past(folder: RunFolder) -> RunFolder:
    """Steps 1 to 5 over two starts, checkpoints of 2 and 4."""
    one_start(folder, step(1), step(2), put_checkpoint(folder, 2), step(3))
    one_start(folder, step(4), put_checkpoint(folder, 4), step(5))
    return folder


def flip_byte(path: Path, offset: int = 100) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x40
    path.write_bytes(content)
