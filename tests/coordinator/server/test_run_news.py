"""Run news: correct, bounded, and not too frequent."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kits import lost_audit
from kits.peer_names import named
from kits.swarm_world.event_bench import Bench, joined
from swarm_coordinator.core.events import AppliedStep, StageShare, VerdictRecord
from swarm_coordinator.core.trust.audits import AuditSettings
from swarm_coordinator.server.run_news import (
    LEADERBOARD_ROWS,
    MIN_INTERVAL_SECONDS,
    Leaderboard,
    NewsPublisher,
)
from swarm_coordinator.status.document import Evaluation
from swarm_coordinator.storage.contributions import StageContribution
from swarm_shared.base.types import MicrobatchIndex, PeerId, RunId, StageIndex, Step, Version
from swarm_shared.identity.owners import effective_bindings, group_by_owner
from swarm_shared.protocol import EvaluationNews, RunNews, coordinator_messages, encode, parse

MANIFEST = Bench().manifest
PEERS = st.sampled_from([PeerId(name) for name in "ABCDEF"])


def desk_of(bench: Bench) -> NewsPublisher:
    return NewsPublisher(Leaderboard(bench.manifest))


def step_of(*shares: tuple[str, int, int]) -> AppliedStep:
    return AppliedStep(
        Step(1), 1, 2.0, 8, 4.0, 1.0, 0.1,
        tuple(StageShare(PeerId(p), StageIndex(s), 1, tokens) for p, s, tokens in shares),
    )  # fmt: skip


def test_credit_is_tokens_times_the_stages_share_of_the_work_and_the_best_come_first() -> None:
    bench = Bench()
    shares = [bench.manifest.work_share(stage) for stage in (0, 1)]
    assert math.isclose(sum(shares), 1.0)
    board = Leaderboard(bench.manifest)
    before = StageContribution(PeerId("a"), "Ada", StageIndex(0), 1, 100, Step(1), Step(1))
    board.begin((before,))
    board.add_step(step_of(("a", 1, 10), ("b", 1, 1000)))
    first, second = board.rows()
    assert (first.peer, first.name, first.tokens) == ("b", None, 1000)
    assert first.credit == pytest.approx(1000 * shares[1])
    assert (second.peer, second.name, second.tokens) == ("a", "Ada", 110)
    assert second.credit == pytest.approx(100 * shares[0] + 10 * shares[1])


def test_a_fall_back_takes_what_does_not_count_any_more_out_of_the_sums() -> None:
    board = Leaderboard(Bench().manifest)
    board.add_step(step_of(("a", 0, 10)))
    board.begin(())
    assert board.rows() == ()


def test_news_have_the_standing_of_owners_and_the_newest_verdicts() -> None:
    bench = Bench()
    desk = desk_of(bench)
    desk.leaderboard.add_step(step_of(("a", 0, 10)))
    bench.run.audits.settings = AuditSettings(probation_cells=50)
    standing = bench.run.audits.standings.change(PeerId("a"))
    standing.passed, standing.lost = 8, 1
    peer = PeerId("a")
    bench.run.audits.verdicts.append(
        VerdictRecord(
            Step(3), MicrobatchIndex(0), StageIndex(0), peer, peer, peer, "it lied " * 100,
            Step(0), lost_audit.evidence(RunId("ab" * 32)),
        )
    )  # fmt: skip
    news = desk.due(bench.run, 0.0)
    assert news is not None
    [row], [verdict] = news.leaderboard, news.verdicts
    assert (row.audits_passed, row.audits_lost, news.probation_cells) == (8, 1, 50)
    assert (verdict.step, verdict.peer, len(verdict.reason)) == (3, "a", 500)


@given(
    st.dictionaries(PEERS, st.integers(1, 1000)),
    st.dictionaries(PEERS, PEERS),
    st.integers(0, 8),
)
def test_rows_are_owners_whatever_the_bindings(
    tokens: dict[PeerId, int], bound: dict[PeerId, PeerId], most: int
) -> None:
    board = Leaderboard(MANIFEST)
    board.add_step(step_of(*((peer, 0, count) for peer, count in tokens.items())))
    for peer in tokens:
        board.describe(peer, peer.lower(), None, bound.get(peer))
    said = {peer: owner for peer, owner in bound.items() if peer in tokens}
    expected = group_by_owner(tokens, effective_bindings(said))
    rows = board.rows(most=20)
    assert {row.peer: row.tokens for row in rows} == {
        person: sum(tokens[one] for one in devices) for person, devices in expected.items()
    }
    for row in rows:
        assert row.devices == tuple(one for one in expected[row.peer] if one != row.peer)
        assert row.name == (row.peer if row.peer in tokens else row.devices[0]).lower()
    assert [row.credit for row in rows] == sorted((row.credit for row in rows), reverse=True)
    assert board.rows(most) == rows[:most]


def test_there_is_news_after_a_step_and_when_the_run_waits_and_not_too_often() -> None:
    bench = Bench()
    bench.tick()
    desk = desk_of(bench)
    waiting = desk.due(bench.run, bench.now)
    assert waiting is not None
    assert "need 1 peer" in waiting.waiting_for
    bench.join_all("a0", "a1")
    bench.one_step()
    assert desk.due(bench.run, bench.now + MIN_INTERVAL_SECONDS / 2) is None
    news = desk.due(bench.run, bench.now + MIN_INTERVAL_SECONDS)
    assert news is not None
    assert (news.version, news.waiting_for) == (1, "")
    assert bench.run.history.last_applied is not None
    assert news.loss == bench.run.history.last_applied.loss
    assert desk.latest == news
    assert desk.due(bench.run, bench.now + 100.0) is None, "nothing has happened since"


def test_the_more_volunteers_the_less_often_news_are_sent() -> None:
    bench = joined("a0", "a1")
    for number in range(3000):
        bench.attach(f"visitor {number}")
    desk = desk_of(bench)
    assert desk.due(bench.run, bench.now) is not None
    bench.one_step()
    assert desk.due(bench.run, bench.now + 5.9) is None
    assert desk.due(bench.run, bench.now + 6.1) is not None


def numbered(number: int) -> PeerId:
    """Base58 has no 0: digits are moved up by one letter."""
    return named("".join("123456789A"[int(digit)] for digit in f"{number:03}"))


def test_the_largest_news_are_bounded_and_parse() -> None:
    bench = Bench()
    desk = desk_of(bench)
    longest = "\N{PILE OF POO}" * 60
    for number in range(500):
        peer = numbered(number)
        desk.leaderboard.describe(peer, longest, longest, None)
        desk.leaderboard.add_step(step_of((peer, 0, number)))
        if number < 100:
            desk.leaderboard.describe(peer, longest, longest, numbered(499))
    news = desk.due(bench.run, bench.now)
    assert news is not None
    assert len(news.leaderboard) == LEADERBOARD_ROWS
    content = encode(news)
    assert len(content) < 64 * 1024
    assert parse(coordinator_messages, content) == news


def test_a_loss_that_is_no_number_is_none() -> None:
    bench = joined("a0", "a1")
    bench.one_step()
    assert bench.run.history.last_applied is not None
    object.__setattr__(bench.run.history.last_applied, "loss", math.nan)
    news = desk_of(bench).due(bench.run, bench.now)
    assert isinstance(news, RunNews)
    assert news.loss is None


def test_a_new_evaluation_is_news_and_its_text_is_cut() -> None:
    bench = Bench()
    desk = desk_of(bench)
    assert desk.due(bench.run, 0.0) is not None
    found = Evaluation(version=0, heldout_loss=2.5, tokens=64, sample="x" * 2000)
    later = MIN_INTERVAL_SECONDS
    news = desk.due(bench.run, later, found)
    assert news is not None
    assert news.evaluation == EvaluationNews(version=Version(0), heldout_loss=2.5, sample="x" * 500)
    assert parse(coordinator_messages, encode(news)) == news
    assert desk.due(bench.run, 2 * later, found) is None
