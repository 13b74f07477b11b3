"""Downloads that a power cut interrupts: what counts as present has its bytes."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from kits.power_cut.lab import FEW_SEEDS, PowerCutDisk, at_every_instant
from swarm_shared.transfer.part_file import CHUNK_BYTES, PartFile

pytestmark = pytest.mark.process

CONTENT = random.Random(5).randbytes(CHUNK_BYTES + 5000)


@pytest.mark.parametrize(
    "seeds",
    [FEW_SEEDS, pytest.param(range(100, 109), marks=pytest.mark.nightly)],
    ids=["few", "many"],
)
def test_a_power_cut_leaves_a_download_to_resume_or_a_whole_file(
    disk: PowerCutDisk, seeds: tuple[int | None, ...]
) -> None:
    destination = disk.place / "runs" / "one" / "a.tokens"

    def part_file() -> PartFile:
        digest = hashlib.sha256(CONTENT).hexdigest()
        return PartFile(destination, "data/a.tokens", len(CONTENT), digest)

    def complete(resumed: bool) -> None:
        part = part_file()
        if part.is_complete():
            return
        present = part.open()
        assert all(chunk_of(destination.with_name("a.tokens.part"), i) for i in present)
        for index in set(range(part.chunks)) - present:
            start = index * CHUNK_BYTES
            content = CONTENT[start : start + CHUNK_BYTES]
            part.write(index, content, hashlib.sha256(content).hexdigest())
        assert part.finish()
        assert resumed or not present

    def check(ended: bool) -> None:
        assert not destination.exists() or destination.read_bytes() == CONTENT
        assert part_file().is_complete() or not ended
        complete(resumed=True)
        assert destination.read_bytes() == CONTENT

    assert at_every_instant(disk, lambda: complete(resumed=False), check, seeds) > 15 * len(seeds)


def chunk_of(part: Path, index: int) -> bool:
    """Whether the part file has the chunk's bytes."""
    start = index * CHUNK_BYTES
    with part.open("rb") as file:
        file.seek(start)
        return file.read(CHUNK_BYTES) == CONTENT[start : start + CHUNK_BYTES]
