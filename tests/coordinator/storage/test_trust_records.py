"""Standings and verdicts in the database, and credit that a lost audit voids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kits import lost_audit
from kits.peer_names import named
from swarm_coordinator.core.events import (
    AppliedStep,
    StageShare,
    StandingRecord,
    StandingsRecord,
    VerdictRecord,
)
from swarm_coordinator.storage.contributions import read_contributions
from swarm_coordinator.storage.database import open_for_reading
from swarm_coordinator.storage.records import read_verdicts
from swarm_coordinator.storage.store import SqliteStore
from swarm_shared.base.types import MicrobatchIndex, RunId, StageIndex, Step

HONEST, LIAR = named("honest"), named("1iar")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore.open(tmp_path / "run.sqlite")
    store.next_generation()
    yield store
    store.close()


def verdict(step: int, void_after: int) -> VerdictRecord:
    return VerdictRecord(
        step=Step(step), microbatch=MicrobatchIndex(3), stage=StageIndex(0), peer=LIAR, owner=LIAR,
        audited=LIAR, reason="it lies", void_after=Step(void_after),
        evidence=lost_audit.evidence(RunId("ab" * 32)),
    )  # fmt: skip


async def apply(store: SqliteStore, *steps: int) -> None:
    for step in steps:
        shares = tuple(StageShare(peer, StageIndex(0), 2, 8) for peer in sorted((HONEST, LIAR)))
        await store.write(AppliedStep(Step(step), step, 2.0, 16, 1.0, 3.0, 0.1, shares))


async def test_the_newest_standing_of_each_owner_is_restored(store: SqliteStore) -> None:
    await store.write(StandingsRecord((StandingRecord(HONEST, 1, 0, Step(1), 2),)))
    newest = StandingRecord(HONEST, 7, 0, Step(4), 5)
    other = StandingRecord(LIAR, 0, 1, Step(2), 0)
    await store.write(StandingsRecord((newest, other)))
    assert set(store.restore().standings) == {newest, other}


async def test_a_verdict_keeps_its_evidence(store: SqliteStore, tmp_path: Path) -> None:
    await store.write(verdict(5, 2))
    with open_for_reading(tmp_path / "run.sqlite") as connection:
        assert read_verdicts(connection) == (verdict(5, 2),)


async def test_a_verdict_about_an_average_names_no_microbatch(
    store: SqliteStore, tmp_path: Path
) -> None:
    found = replace(verdict(5, 2), microbatch=None, evidence=None, statements=("one", "two"))
    await store.write(found)
    with open_for_reading(tmp_path / "run.sqlite") as connection:
        assert read_verdicts(connection) == (found,)


async def test_credit_since_the_last_passed_audit_is_void(store: SqliteStore) -> None:
    await apply(store, 1, 2, 3, 4, 5, 6)
    await store.write(verdict(5, 2))
    counted = {c.peer: c.microbatches for c in store.read(read_contributions)}
    assert counted == {HONEST: 12, LIAR: 6}
