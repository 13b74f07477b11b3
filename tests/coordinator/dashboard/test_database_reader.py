"""Reading on from where one was gives what reading everything again would give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kits import lost_audit
from kits.coordinator import run as run_kit
from swarm_coordinator.admission.book import (
    AdmissionBook,
    MemberAdmitted,
    PeerBanned,
    PeerUnbanned,
    TokenCreated,
    TokenRevoked,
    hash_of,
)
from swarm_coordinator.core.events import (
    AppliedStep,
    Note,
    RolledBack,
    StageShare,
    VerdictRecord,
)
from swarm_coordinator.dashboard import database_reader
from swarm_coordinator.dashboard.curve import CurveBuilder
from swarm_coordinator.dashboard.database_reader import (
    EVENTS_KEPT,
    STEP_SECONDS,
    DatabaseReader,
    DatabaseView,
)
from swarm_coordinator.storage.admission_rows import read_admission
from swarm_coordinator.storage.connection import Connection, DatabaseLocation
from swarm_coordinator.storage.history import history
from swarm_coordinator.storage.records import PeerSeen
from swarm_coordinator.storage.store import SqliteStore, open_store
from swarm_shared.base.types import MicrobatchIndex, RunId, StageIndex, Step, Version

SHARES = (0.25, 0.75)
NOW = 2e9


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    made = SqliteStore.open(tmp_path / "run.sqlite")
    made.next_generation()
    yield made
    made.close()


def place(store: SqliteStore) -> Path:
    return Path(store._name)


def said(read: DatabaseView) -> tuple[object, ...]:
    rows = tuple(read.steps.row(index) for index in range(read.step_count))
    return (
        rows, read.tokens, read.seconds, read.curve, read.contributions, read.notes,
        read.durations, read.rollbacks,
    )  # fmt: skip


def look_afresh(store: SqliteStore) -> DatabaseView:
    return DatabaseReader(place(store), SHARES).refresh(NOW)


def test_a_run_that_was_never_started_has_no_history(tmp_path: Path) -> None:
    read = DatabaseReader(tmp_path / "nothing.sqlite", SHARES).refresh(NOW)
    assert (read.step_count, read.contributions, read.notes) == (0, (), ())


def test_steps_that_come_later_are_added_and_none_is_counted_twice(store: SqliteStore) -> None:
    reader = DatabaseReader(place(store), SHARES)
    for number in range(1, 6):
        run_kit.write(store, run_kit.step(number))
        read = reader.refresh(NOW)
        assert read.step_count == number
        assert said(read) == said(look_afresh(store))
    assert read.tokens == 5 * 32


def test_long_histories_are_read_in_parts(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_kit.write(store, *(run_kit.step(number) for number in range(1, 8)))
    whole = said(look_afresh(store))
    monkeypatch.setattr(database_reader, "STEPS_PER_QUERY", 2)
    assert said(look_afresh(store)) == whole


def test_what_a_rollback_took_back_is_forgotten(store: SqliteStore) -> None:
    reader = DatabaseReader(place(store), SHARES)
    run_kit.write(store, *(run_kit.step(number) for number in range(1, 5)))
    before = reader.refresh(NOW)
    run_kit.write(store, RolledBack(Version(2), "all peers were lost"), run_kit.step(3, attempt=7))
    after = reader.refresh(NOW)
    assert [after.steps.row(index).step for index in range(after.step_count)] == [1, 2, 3]
    assert after.rollbacks == 1
    assert said(after) == said(look_afresh(store))
    assert before.step_count == 4, "what was handed out before has not changed"


def test_admission_is_read_after_each_change_and_not_for_nothing(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A published token has any number of members, and is read once a second."""
    read: list[AdmissionBook] = []

    def counting(connection: Connection) -> AdmissionBook:
        read.append(read_admission(connection))
        return read[-1]

    monkeypatch.setattr(database_reader, "read_admission", counting)
    reader = DatabaseReader(place(store), SHARES)
    assert reader.refresh(NOW).book.bans == {}
    for number, (record, bans, tokens, members) in enumerate(
        [
            (TokenCreated(1, hash_of("secret")), 0, 1, 0),
            (MemberAdmitted(run_kit.ANNA, 1), 0, 1, 1),
            (PeerBanned(run_kit.ANNA, "spam"), 1, 1, 0),
            (PeerBanned(run_kit.ANNA, "lies"), 1, 1, 0),
            (PeerUnbanned(run_kit.ANNA), 0, 1, 1),
            (TokenRevoked(1), 0, 1, 0),
        ],
        start=2,
    ):
        run_kit.write(store, record)
        book = reader.refresh(NOW).book
        assert (len(book.bans), len(book.tokens), len(book.members("token"))) == (
            bans, tokens, members,
        )  # fmt: skip
        assert reader.refresh(NOW).book is book
        assert len(read) == number


def test_contributions_are_those_of_history_and_credit_is_tokens_times_work_share(
    store: SqliteStore,
) -> None:
    run_kit.write(store, PeerSeen(run_kit.ANNA, "anna\x1b[2J"), PeerSeen(run_kit.BERT))
    run_kit.write(store, run_kit.step(1), run_kit.step(2))
    read = look_afresh(store)
    bert, anna = read.contributions
    assert (bert.rank, bert.id_end, bert.name) == (1, "KooWBert", None)
    assert anna.name == "anna\N{REPLACEMENT CHARACTER}[2J"
    # 16 of stage 0 and 32 of stage 1 in each step, and 16 of stage 0.
    assert math.isclose(bert.credit, 2 * (16 * 0.25 + 32 * 0.75))
    assert math.isclose(anna.credit, 2 * 16 * 0.25)
    assert (bert.stages, bert.steps, bert.microbatches, bert.tokens) == ((0, 1), 2, 6, 96)
    told = history(place(store)).contributions
    assert sum(one.tokens for one in told) == bert.tokens + anna.tokens
    assert sum(one.microbatches for one in told) == bert.microbatches + anna.microbatches


def test_a_verdict_voids_credit_of_steps_that_were_read_before(store: SqliteStore) -> None:
    reader = DatabaseReader(place(store), SHARES)
    run_kit.write(store, *(run_kit.step(number) for number in (1, 2, 3)))
    before = {one.id_end: one.microbatches for one in reader.refresh(NOW).contributions}
    run_kit.write(
        store,
        VerdictRecord(
            Step(2), MicrobatchIndex(0), StageIndex(0), run_kit.ANNA, run_kit.ANNA, run_kit.ANNA,
            "it lied", Step(0), lost_audit.evidence(RunId("ab" * 32)),
        ),
    )  # fmt: skip
    after = {one.id_end: one.microbatches for one in reader.refresh(NOW).contributions}
    assert (before["KooWAnna"], after["KooWAnna"]) == (3, 1)
    assert before["KooWBert"] == after["KooWBert"] == 9
    told = history(place(store)).contributions
    assert sum(one.microbatches for one in told) == sum(after.values())


def test_both_kinds_of_database_give_the_same(new_place: Callable[[], DatabaseLocation]) -> None:
    at = new_place()
    store = open_store(at)
    store.next_generation()
    reader = DatabaseReader(at, SHARES)
    run_kit.write(store, PeerSeen(run_kit.ANNA, "anna", "As"), run_kit.step(1), Note("hello"))
    first = reader.refresh(NOW)
    assert (first.step_count, first.notes[-1].text, first.teams[0].team) == (1, "hello", "As")
    run_kit.write(store, run_kit.step(2), RolledBack(Version(1), "lost"), run_kit.step(2, 7))
    second = reader.refresh(NOW)
    assert (second.step_count, second.tokens, second.rollbacks) == (2, 64, 1)
    assert second.contributions == DatabaseReader(at, SHARES).refresh(NOW).contributions
    store.close()


def test_a_new_name_is_seen(store: SqliteStore) -> None:
    reader = DatabaseReader(place(store), SHARES)
    run_kit.write(store, run_kit.step(1))
    assert reader.refresh(NOW).contributions[0].name is None
    run_kit.write(store, PeerSeen(run_kit.BERT, "bert"))
    assert reader.refresh(NOW).contributions[0].name == "bert"


def test_a_team_has_its_present_members_with_their_whole_contributions(store: SqliteStore) -> None:
    reader = DatabaseReader(place(store), SHARES)
    run_kit.write(store, run_kit.step(1))
    assert reader.refresh(NOW).teams == ()
    run_kit.write(
        store, PeerSeen(run_kit.ANNA, "anna", "the team"), PeerSeen(run_kit.BERT, None, "the team")
    )
    read = reader.refresh(NOW)
    [team] = read.teams
    assert (team.team, team.members, team.tokens) == ("the team", 2, 64)
    assert math.isclose(team.credit, sum(one.credit for one in read.contributions))
    assert {one.team for one in read.contributions} == {"the team"}
    # The end of a session says nothing of teams; another hello without one does.
    run_kit.write(store, PeerSeen(run_kit.ANNA))
    assert reader.refresh(NOW).teams[0].members == 2
    run_kit.write(store, PeerSeen(run_kit.ANNA, "anna", ""))
    assert reader.refresh(NOW).teams[0].members == 1


def test_only_the_newest_notes_are_kept(store: SqliteStore) -> None:
    reader = DatabaseReader(place(store), SHARES)
    run_kit.write(store, *(Note(f"note {number}") for number in range(EVENTS_KEPT)))
    assert len(reader.refresh(NOW).notes) == EVENTS_KEPT
    run_kit.write(store, *(Note(f"later {number}") for number in range(3)))
    noted = reader.refresh(NOW).notes
    assert len(noted) == EVENTS_KEPT
    assert [one.text for one in noted[-4:]] == [
        f"note {EVENTS_KEPT - 1}", "later 0", "later 1", "later 2",
    ]  # fmt: skip


def test_durations_are_cumulative_counts_as_a_histogram_wants_them(store: SqliteStore) -> None:
    for number, seconds in enumerate((0.05, 2.0, 5000.0), start=1):
        share = StageShare(run_kit.ANNA, StageIndex(0), 1, 16)
        run_kit.write(
            store, AppliedStep(Step(number), number, 1.0, 16, seconds, 1.0, 1e-3, (share,))
        )
    read = look_afresh(store)
    at_most = dict(zip(STEP_SECONDS, read.durations, strict=False))
    assert (at_most[0.1], at_most[1.0], at_most[3.0], at_most[1000.0]) == (1, 1, 2, 2)
    assert read.durations[-1] == 3


steps = st.lists(
    st.tuples(st.one_of(st.none(), st.floats(0, 10)), st.integers(1, 1000), st.floats(0.1, 10)),
    min_size=1, max_size=200,
)  # fmt: skip


@given(steps, st.integers(2, 20))
def test_a_curve_covers_every_step_once_in_a_bounded_number_of_points(
    rows: list[tuple[float | None, int, float]], most: int
) -> None:
    keeper = CurveBuilder(most)
    for number, (loss, tokens, seconds) in enumerate(rows, start=1):
        keeper.add(number, loss, tokens, seconds)
    points = keeper.curve().points
    assert len(points) <= most
    covered = [n for point in points for n in range(point.first_step, point.last_step + 1)]
    assert covered == list(range(1, len(rows) + 1))
    for point in points:
        part = rows[point.first_step - 1 : point.last_step]
        losses = [loss for loss, _, _ in part if loss is not None]
        assert (point.loss is None) == (not losses)
        if losses:
            assert point.loss is not None
            assert math.isclose(point.loss, sum(losses) / len(losses), abs_tol=1e-9)
            assert (point.lowest_loss, point.highest_loss) == (min(losses), max(losses))
        rate = sum(tokens for _, tokens, _ in part) / sum(seconds for _, _, seconds in part)
        assert point.tokens_per_second is not None
        assert math.isclose(point.tokens_per_second, rate)
