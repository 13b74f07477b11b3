"""A daemon's state, reason and sentence, and its stored runs and contribution."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_client.cli.options import parse_duration
from swarm_client.cli.text import status_text
from swarm_client.control import contribution_log, known_runs
from swarm_client.control.contribution_log import ContributionLog
from swarm_client.control.known_runs import StoredPause, StoredRuns
from swarm_client.control.messages import JoinArguments
from swarm_client.control.status_document import (
    DaemonState,
    DeviceView,
    LeaderboardRow,
    Status,
    SuspendReason,
)
from swarm_client.control.status_sentence import (
    SENTENCES,
    StatusFacts,
    StopCause,
    Suspension,
    clock_text,
    describe,
)
from swarm_client.control.stored_file import read_document, write_document
from swarm_shared.base.errors import StorageError, UsageError
from swarm_shared.transfer.download_meter import DownloadProgress

NOON = datetime.datetime(2026, 11, 21, 12, 0).timestamp()
AT_WORK = StatusFacts(attached=True, stage=3, working=True)

PAUSES = [
    reason
    for reason in SuspendReason
    if reason
    not in (
        SuspendReason.FINISHING, SuspendReason.NO_RUN, SuspendReason.COORDINATOR_AWAY,
        SuspendReason.RUN_FINISHED, SuspendReason.NOT_ADMITTED,
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "word", "reason", "told"),
    [
        (AT_WORK, DaemonState.CONTRIBUTING, None, "computing stage 3"),
        (StatusFacts(attached=True, stage=3), DaemonState.QUEUED, None, "nothing to compute"),
        (
            StatusFacts(attached=True, stage=3, waiting_for="stage 1, where every peer has paused"),
            DaemonState.QUEUED,
            None,
            "the run waits for stage 1, where every peer has paused",
        ),
        (StatusFacts(), DaemonState.SYNCING, None, "connecting to"),
        (StatusFacts(attached=True), DaemonState.SYNCING, None, "joining"),
        (
            StatusFacts(attached=True, loading_stage=2),
            DaemonState.SYNCING,
            None,
            "loading stage 2",
        ),
        (
            StatusFacts(attached=True, loading_stage=2, downloads=("stage 2: 1 MB of 4 MB",)),
            DaemonState.SYNCING,
            None,
            "downloading stage 2: 1 MB of 4 MB",
        ),
        (
            StatusFacts(attached=True, stage=2, downloads=("training data: 0 B of 4 MB",)),
            DaemonState.QUEUED,
            None,
            "holding stage 2; downloading training data: 0 B of 4 MB",
        ),
        (
            StatusFacts(problem="nobody answers", stage=3, working=True),
            DaemonState.DEGRADED,
            SuspendReason.COORDINATOR_AWAY,
            "nobody answers",
        ),
        (
            StatusFacts(attached=True, stage=3, leaving=True, working=True),
            DaemonState.PAUSED,
            SuspendReason.FINISHING,
            "handing the stage over",
        ),
        (
            StatusFacts(stopped=StopCause(SuspendReason.NO_RUN)),
            DaemonState.STOPPED,
            SuspendReason.NO_RUN,
            "swarm-client join INVITE",
        ),
        (
            StatusFacts(stopped=StopCause(SuspendReason.NOT_ADMITTED, "you are banned")),
            DaemonState.STOPPED,
            SuspendReason.NOT_ADMITTED,
            "you are banned",
        ),
        (
            StatusFacts(stopped=StopCause(SuspendReason.RUN_FINISHED)),
            DaemonState.STOPPED,
            SuspendReason.RUN_FINISHED,
            "finished",
        ),
    ],
)
def test_each_state_has_a_state_a_reason_and_a_sentence(
    facts: StatusFacts, word: DaemonState, reason: SuspendReason | None, told: str
) -> None:
    described = describe(facts, NOON)
    assert (described.state, described.reason) == (word, reason)
    assert told in described.sentence


@pytest.mark.parametrize("reason", PAUSES)
@pytest.mark.parametrize(
    "facts", [AT_WORK, StatusFacts(), StatusFacts(stopped=StopCause(SuspendReason.NO_RUN))], ids=str
)
def test_each_reason_to_pause_is_shown_whatever_else_is_so(
    reason: SuspendReason, facts: StatusFacts
) -> None:
    paused = dataclasses.replace(facts, suspension=Suspension(reason))
    described = describe(paused, NOON)
    assert (described.state, described.reason, described.until) == (
        DaemonState.PAUSED,
        reason,
        None,
    )
    assert described.sentence == SENTENCES[reason]


def test_a_pause_with_an_end_shows_when_it_ends() -> None:
    six = NOON + 6 * 3600
    described = describe(
        StatusFacts(suspension=Suspension(SuspendReason.PAUSED_BY_USER, six)), NOON
    )
    assert described.until == six
    assert described.sentence == "paused by you until 18:00; `swarm-client resume` continues"
    assert clock_text(NOON + 30 * 3600, NOON) == "18:00 on 22 November"


def test_names_of_others_cannot_steer_a_terminal() -> None:
    status = Status(
        software="1", pid=1, time=NOON, started_at=NOON, state=DaemonState.QUEUED,
        sentence="a\x1b[2Jb",
        peer="p" * 20, name="\x07me", leaderboard=(LeaderboardRow(name="x"),),
    )  # fmt: skip
    assert all(line.isprintable() for line in status_text(status).splitlines())


def test_a_download_beside_the_held_stage_and_the_class_are_in_the_row_of_their_device() -> None:
    download = DownloadProgress(
        what="stage 3", received_bytes=10**6, total_bytes=4 * 10**6, bytes_per_second=1e5
    )
    device = DeviceView(
        id="cpu", label="CPU", stage=2, phase="serving", downloads=(download,),
        arithmetic="5e0f1a2b", state=DaemonState.CONTRIBUTING, sentence="computing stage 2",
    )  # fmt: skip
    status = Status(
        software="1", pid=1, time=NOON, started_at=NOON, state=DaemonState.CONTRIBUTING,
        sentence="computing stage 2", peer="p" * 20, devices=(device,),
    )  # fmt: skip
    [row] = [line for line in status_text(status).splitlines() if "device" in line]
    assert "0 in flight, class 5e0f1a2b; " in row
    assert row.endswith("; downloading stage 3: 1 MB of 4 MB (25 %), 100 kB/s, 30 s left")


# ---------------------------------------------------------------- credit


DAY = datetime.date(2026, 11, 21)


def given_on(*ages: int, credit: float = 100.0) -> ContributionLog:
    found = ContributionLog()
    for age in ages:
        found = found.with_step(DAY - datetime.timedelta(days=age), 1, 10, credit)
    return found


def test_recent_credit_halves_in_seven_days() -> None:
    week_old = contribution_log.recent_credit(given_on(7).days, DAY)
    assert week_old == pytest.approx(contribution_log.recent_credit(given_on(0).days, DAY) / 2)


def test_recent_credit_of_a_steady_giver_is_what_it_gives_a_day() -> None:
    assert contribution_log.recent_credit(given_on(*range(400)).days, DAY) == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("ages", "days"), [((), 0), ((0,), 1), ((1, 2), 2), ((0, 1, 3), 2), ((2, 3), 0)]
)
def test_a_streak_is_not_broken_by_a_day_that_has_only_begun(
    ages: tuple[int, ...], days: int
) -> None:
    assert contribution_log.streak(given_on(*ages).days, DAY) == days


def test_a_diary_keeps_its_sums_when_it_forgets_days(tmp_path: Path) -> None:
    kept = given_on(*range(contribution_log.KEPT_DAYS + 50))
    assert len(kept.days) == contribution_log.KEPT_DAYS
    assert kept.credit == pytest.approx(100.0 * (contribution_log.KEPT_DAYS + 50))
    path = tmp_path / "contribution.json"
    assert read_document(path, ContributionLog()) == ContributionLog()
    write_document(path, kept)
    assert read_document(path, ContributionLog()) == kept


@pytest.mark.parametrize("content", ["", "{", '{"format": 2}', '{"days": {"x": 1}}'])
def test_a_damaged_file_is_named_and_left_as_it_is(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a file"
    path.write_text(content)
    with pytest.raises(StorageError, match="a file"):
        read_document(path, ContributionLog())
    if "days" not in content:
        with pytest.raises(StorageError, match="a file"):
            known_runs.read(path)
    assert path.read_text() == content


# ---------------------------------------------------------------- known runs

JOIN = JoinArguments(invite="swarm1abc")


def book(*ids: str) -> StoredRuns:
    found = StoredRuns()
    for when, run in enumerate(ids):
        found = found.joined(run, f"run {run}", JOIN, float(when))
    return found


def test_the_run_that_was_joined_last_is_the_chosen_one_and_invites_are_not_shown() -> None:
    known = book("aa1", "bb2")
    assert [(run.id, run.chosen) for run in known.listed()] == [("aa1", False), ("bb2", True)]
    assert "swarm1" not in str(known.listed())


def test_a_run_that_is_joined_again_is_one_entry_with_the_newest_wishes() -> None:
    again = JoinArguments(invite="swarm1abc", threads=2)
    known = book("aa1", "bb2").joined("aa1", "renamed", again, 9.0)
    assert [run.id for run in known.runs] == ["bb2", "aa1"]
    run = known.find("aa1")
    assert (run.name, run.joined_at, run.join.threads) == ("renamed", 0.0, 2)


def test_a_run_is_found_by_name_or_by_how_its_id_begins() -> None:
    known = book("aa1", "aa2", "bb2")
    assert known.find("run bb2").id == known.find("bb").id == "bb2"
    for wanted in ("aa", "c"):
        with pytest.raises(UsageError, match=r"run aa1 \(aa1\)"):
            known.find(wanted)


def test_a_forgotten_run_is_not_chosen_any_more(tmp_path: Path) -> None:
    known = book("aa1", "bb2").pausing(StoredPause(until=5.0)).without("bb2")
    assert known.chosen_run() is None
    path = tmp_path / "runs.json"
    known_runs.write(path, known)
    assert path.stat().st_mode & 0o777 == 0o600
    assert known_runs.read(path) == known


@given(st.lists(st.sampled_from([f"r{n}" for n in range(130)]), max_size=160))
def test_the_list_of_runs_is_bounded_and_each_is_there_once(ids: list[str]) -> None:
    known = book(*ids)
    entries = [run.id for run in known.runs]
    assert len(entries) == len(set(entries)) <= known_runs.MAX_RUNS
    assert known.chosen == (ids[-1] if ids else None)
    assert not ids or known.chosen_run() is not None


# ---------------------------------------------------------------- what people type and read


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1h30m", 5400), ("1d", 86400)]
)
def test_a_time_is_read_as_people_say_it(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@given(st.text(max_size=12))
def test_whatever_is_typed_is_a_time_or_a_usage_error(text: str) -> None:
    seconds = 1.0
    with contextlib.suppress(UsageError):
        seconds = parse_duration(text)
    assert 0 < seconds <= 366 * 86400
