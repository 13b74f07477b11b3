"""Standings of owners, and what audits make of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_coordinator.core.events import StandingRecord
from swarm_coordinator.core.trust import standing
from swarm_coordinator.core.trust.audits import (
    PROBATION_SHARE,
    AuditBook,
    AuditSettings,
    StepAudits,
)
from swarm_coordinator.core.trust.standing import restored_standings
from swarm_shared.base.types import PeerId, Step, Version

NEW, OLD, OLDER, TRUSTED = (PeerId(name) for name in ("new", "old", "older", "trusted"))


def book(*, share: float = 0.02, trusted: bool = False) -> AuditBook:
    settings = AuditSettings(
        share, probation_cells=3, trusted_owners=frozenset((TRUSTED,) if trusted else ())
    )
    records = [StandingRecord(owner, 3, 0, Step(7), 2) for owner in (OLD, OLDER)]
    return AuditBook(settings, lambda: 0.5, standings=restored_standings(records))


def test_an_owner_on_probation_is_audited_more_often() -> None:
    audits = book()
    assert audits.share(NEW) == PROBATION_SHARE
    assert audits.share(OLD) == 0.02
    assert book(share=0.9).share(NEW) == 0.9


def test_an_established_owner_never_counts_150_cells_without_an_audit() -> None:
    audits, none_open = book(), StepAudits()  # draws that audit nothing
    assert [audits.draws(OLD, none_open) for _ in range(141)] == [False] * 139 + [True] * 2
    assert not audits.draws(OLDER, none_open), "each owner's cells are counted apart"


def test_a_run_without_audits_audits_nothing_however_much_is_counted() -> None:
    audits = AuditBook(AuditSettings(0.0, probation_cells=0), lambda: 0.5)
    assert not any(audits.draws(NEW, StepAudits()) for _ in range(1000))


def test_a_trusted_owner_is_on_no_probation() -> None:
    assert book(trusted=True).share(TRUSTED) == 0.02


def test_two_established_owners_judge_alone() -> None:
    audits = book()
    assert audits.entitled([NEW, OLD, OLDER], NEW) == {OLD, OLDER}
    assert audits.entitled([NEW, OLD, PeerId("x")], PeerId("x")) == {NEW, OLD}
    assert audits.entitled([NEW, OLD, OLDER], OLD) == {NEW, OLDER}


def test_no_owner_judges_itself() -> None:
    assert book().entitled([OLD], OLD) == frozenset()


def test_a_trusted_owner_judges_before_all_that_are_not_established() -> None:
    assert book(trusted=True).entitled([NEW, TRUSTED, PeerId("x")], PeerId("x")) == {TRUSTED}


def test_changed_standings_are_taken_once() -> None:
    audits = book()
    audits.standings.change(OLD).passed += 1
    audits.standings.change(NEW).lost += 1
    assert audits.standings.take_changed() == (
        StandingRecord(NEW, 0, 1, Step(0), 0),
        StandingRecord(OLD, 4, 0, Step(7), 2),
    )
    assert audits.standings.take_changed() == ()


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_after_a_roll_back_no_standing_counts_a_step_that_was_taken_back(
    vested: int, unvested_since: int, version: int
) -> None:
    audits = book()
    known = audits.standings.change(OLD)
    known.vested_step, known.unvested_since = Step(vested), Step(unvested_since)
    audits.standings.take_changed()
    audits.standings.roll_back(Version(version))
    kept = unvested_since if unvested_since <= version else 0
    assert (known.vested_step, known.unvested_since) == (min(vested, version), kept)
    changed = {record.owner for record in audits.standings.take_changed()}
    assert (OLD in changed) == ((known.vested_step, kept) != (vested, unvested_since))


def test_of_too_many_owners_those_with_a_lost_audit_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "MAX_OWNERS", 3)
    audits = book()
    audits.standings.change(NEW).lost += 1
    audits.standings.change(PeerId("x"))
    assert NEW in audits.standings.owners
    assert len(audits.standings.owners) == 3


def test_owners_without_end_cost_no_search_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "MAX_OWNERS", 80)
    audits, sizes = book(), set[int]()
    for number in range(1000):
        audits.standings.note_counted(PeerId(f"{number}"))
        sizes.add(len(audits.standings.owners))
    assert (min(sizes), max(sizes)) == (3, 80)
    assert len(audits.standings.owners) in range(70, 81)
    left = set(audits.standings.owners)
    audits.standings.note_counted(PeerId("one more"))
    while len(audits.standings.owners) < 80:
        audits.standings.note_counted(PeerId(f"{len(audits.standings.owners)} more"))
    audits.standings.note_counted(PeerId("the last"))
    assert len(audits.standings.owners) == 71, "ten went at once"
    assert {OLD, OLDER} <= left & set(audits.standings.owners)
