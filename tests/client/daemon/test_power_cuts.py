"""The files of a volunteer's home after a power cut: the old one or the new one, with its mode."""

from __future__ import annotations

import datetime
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kits.power_cut.lab import FEW_SEEDS, PowerCutDisk, at_every_instant
from swarm_client.control import known_runs
from swarm_client.control.contribution_log import ContributionLog
from swarm_client.control.known_runs import StoredRuns
from swarm_client.control.messages import JoinArguments
from swarm_client.control.stored_file import read_document, write_document
from swarm_client.governor.transfer_quota import TransferCounts
from swarm_client.machine.home import Home
from swarm_client.preferences.file import set_preference
from swarm_client.preferences.layers import read_file
from swarm_shared.identity.keys import Identity

pytestmark = pytest.mark.process

MORE_SEEDS = range(100, 130)
TODAY = datetime.date(2026, 11, 23)

every_seed = pytest.mark.parametrize(
    "seeds", [FEW_SEEDS, pytest.param(MORE_SEEDS, marks=pytest.mark.nightly)], ids=["few", "many"]
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@every_seed
def test_an_identity_that_was_used_once_is_still_there(
    disk: PowerCutDisk, seeds: tuple[int | None, ...]
) -> None:
    """In a home that did not exist either, three folders deep."""
    place = disk.place / "share" / "swarmtrain" / "home"
    seen = disk.place.parent / "peer id"

    def start() -> None:
        home = Home.create(place)
        seen.write_text(Identity.load_or_create(home.identity_path).peer_id)

    def check(ended: bool) -> None:
        home = Home.create(place)
        if ended:
            assert Identity.load(home.identity_path).peer_id == seen.read_text()
        again = Identity.load_or_create(home.identity_path)
        assert Identity.load(home.identity_path).peer_id == again.peer_id
        assert mode(home.identity_path) == 0o600

    assert at_every_instant(disk, start, check, seeds) > 8 * len(seeds)


def set_a_preference(home: Home, value: int) -> None:
    set_preference(home.path / "preferences.toml", "max_cores", str(value))


def preference(home: Home) -> object:
    return read_file(home.path / "preferences.toml").get("max_cores")


def join_a_run(home: Home, value: int) -> None:
    book = StoredRuns()
    for number in range(value):
        book = book.joined(f"run {number}", "a run", JoinArguments(invite="i" * 4000), 0.0)
    known_runs.write(home.runs_path, book)


def joined_runs(home: Home) -> object:
    return len(known_runs.read(home.runs_path).runs)


def log_a_contribution(home: Home, value: int) -> None:
    write_document(home.contribution_path, ContributionLog().with_step(TODAY, value, 1, 1.0))


def contribution(home: Home) -> object:
    return read_document(home.contribution_path, ContributionLog()).microbatches


def count_a_transfer(home: Home, value: int) -> None:
    counts = TransferCounts(home.path)
    counts.add(TODAY, value - sum(counts.bytes_by_day.values()))
    counts.save()


def transferred(home: Home) -> object:
    return sum(TransferCounts(home.path).bytes_by_day.values())


def take_a_port(home: Home, value: int) -> None:
    home.remember_port(value)


def port(home: Home) -> object:
    return home.remembered_port()


@every_seed
@pytest.mark.parametrize(
    ("change", "read", "name", "private"),
    [
        (set_a_preference, preference, "preferences.toml", True),
        (join_a_run, joined_runs, "runs.json", True),
        (log_a_contribution, contribution, "contribution.json", False),
        (count_a_transfer, transferred, "transfer.json", False),
        (take_a_port, port, "port", False),
    ],
)
def test_a_file_of_the_home_is_the_old_one_or_the_new_one(
    disk: PowerCutDisk,
    seeds: tuple[int | None, ...],
    change: Callable[[Home, int], None],
    read: Callable[[Home], object],
    name: str,
    private: bool,
) -> None:
    home = Home.create(disk.place / "home")
    change(home, 3)

    def check(ended: bool) -> None:
        assert read(home) in ([7] if ended else [3, 7])
        assert mode(home.path / name) == (0o600 if private else 0o644)

    assert at_every_instant(disk, lambda: change(home, 7), check, seeds) > 5 * len(seeds)
