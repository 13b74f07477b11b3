"""`swarm-coordinator export`: its options, and the folders that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from kits.coordinator.commands import complaint
from swarm_coordinator.cli.main import run


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--shard-size=5", "'5' is no size like 5GB"),
        ("--shard-size=0MB", "more than 0 bytes"),
        ("--dtype=int8", "'int8' is not one of"),
    ],
)
def test_a_wrong_option_is_one_sentence(
    option: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", str(tmp_path), str(tmp_path / "out"), option]) == 2
    assert said in complaint(capsys)
