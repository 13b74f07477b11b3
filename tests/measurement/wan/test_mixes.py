"""The file of lines and fleets: what it may say, and what is said when it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.wan.mixes import read_mixes
from swarm_shared.base.errors import ConfigurationError

LINK = "[links.slow]\nup_mbit = 1\ndown_mbit = 2\nrtt_ms = 40\njitter_ms = 5\n[mixes]\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "mixes.toml"
    path.write_text(text)
    return path


def test_the_projects_own_mixes_are_as_the_benchmark_needs_them() -> None:
    file = read_mixes()
    assert {"fibre", "cable", "dsl", "mobile", "heterogeneous"} <= set(file.mixes)
    assert file.links["cable"].up_mbit < file.links["cable"].down_mbit
    assert "server" in file.links
    for name in file.mixes:
        assert len(file.mix(name).peers) % 4 == 0, "four stages with as many peers each"


def test_a_mix_is_its_machines_one_by_one(tmp_path: Path) -> None:
    text = LINK + 'two = [{ link = "slow", count = 2, speed = 0.5 }, { link = "slow" }]\n'
    mix = read_mixes(written(tmp_path, text)).mix("two")
    assert [peer.speed for peer in mix.peers] == [0.5, 0.5, 1.0]
    assert mix.peers[0].link.up_bytes_per_second == 125_000


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[links", "is not valid TOML"),
        (LINK + 'm = [{ link = "fast" }]', "names link 'fast'; there are slow"),
        (LINK + 'm = [{ link = "slow", count = 0 }]', "mixes.m.0.count"),
        (LINK + "m = []", "has no peers"),
        (LINK + 'm = [{ link = "slow", sped = 1 }]', "mixes.m.0.sped"),
        (LINK.replace("jitter_ms = 5", "jitter_ms = 21") + 'm = [{ link = "slow" }]', "jitter_ms"),
        (LINK.replace("up_mbit = 1", "up_mbit = 0") + 'm = [{ link = "slow" }]', "up_mbit"),
    ],
)
def test_what_is_wrong_in_the_file_is_said(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=r"mixes\.toml") as refusal:
        read_mixes(written(tmp_path, text))
    assert complaint in str(refusal.value)


def test_a_mix_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    file = read_mixes(written(tmp_path, LINK + 'm = [{ link = "slow" }]'))
    with pytest.raises(ConfigurationError, match=r"no mix 'x'; choose one of m"):
        file.mix("x")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_mixes(tmp_path / "none.toml")
