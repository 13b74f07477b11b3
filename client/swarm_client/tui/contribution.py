"""The panes of this machine's contribution and of the leaderboard."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

from swarm_client.tui.model import ClientModel
from swarm_shared.base.text import printable
from swarm_shared.tui.bars import bar
from swarm_shared.tui.formatting import counted, number, percent, short_number
from swarm_shared.tui.plot import columns_plot
from swarm_shared.tui.styled_text import EMPTY, Line, heading, line, wrapped
from swarm_shared.tui.table import Column, table

if TYPE_CHECKING:
    from swarm_client.control.status_document import AuditsView, LeaderboardRow, Status

_EXPLAINED = (
    "Credit counts work in applied steps: tokens times the stage's share of the model's work. "
    "It can be recomputed from the run's signed ledger."
)
_LONGEST_HISTORY_DAYS = 366


def contribution(model: ClientModel, width: int, height: int) -> list[Line]:
    status = model.status
    if status is None:
        return [EMPTY]
    given = status.contribution
    streak = counted(given.streak_days, "day in a row", "days in a row")
    lines = [
        heading("Given", width),
        line(("  validated tokens  ", "dim"), (number(given.tokens), "strong")),
        line(
            ("  microbatches      ", "dim"), number(given.microbatches),
            f" in {counted(given.steps, 'applied step', 'applied steps')}",
        ),
        line(("  credit            ", "dim"), (number(given.credit, 2), "strong")),
        line(
            ("  lately            ", "dim"),
            f"{number(given.recent_credit, 2)} a day (half-life of seven days)",
        ),
        line(("  streak            ", "dim"), streak),
        *_audits(status.audits),
        EMPTY,
        heading("Credit a day", width),
        *_history(status, width, min(14, max(4, height - 16))),
        EMPTY,
        *wrapped(_EXPLAINED, width - 2, "dim", "  "),
    ]  # fmt: skip
    return lines


def _audits(audits: AuditsView | None) -> list[Line]:
    """This owner's standing, and the verdicts against it."""
    if audits is None:
        return []
    standing = (
        f"on probation, {counted(audits.to_pass, 'more audit', 'more audits')} to pass"
        if audits.to_pass
        else "established"
    )
    return [
        line(
            ("  audits            ", "dim"), f"{number(audits.passed)} passed, ",
            (f"{audits.lost} lost", "warn" if audits.lost else ""),
        ),
        line(("  standing          ", "dim"), standing),
        *(
            line((f"  step {verdict.step:<13}", "dim"), (printable(verdict.reason), "warn"))
            for verdict in audits.verdicts[-3:]
        ),
    ]  # fmt: skip


def _history(status: Status, width: int, height: int) -> list[Line]:
    days = daily(status.contribution.days, width - 12)
    if not days:
        return [line(("  nothing has been credited yet", "dim"))]
    top = max(credit for _, credit in days)
    rows = columns_plot([credit for _, credit in days], width - 12, height - 1)
    lines = []
    for index, row in enumerate(rows):
        told = short_number(top) if index == 0 else "0" if index == len(rows) - 1 else ""
        lines.append(line((f"{told:>8} ", "dim"), ("│", "rule"), (row, "accent")))
    first, last = days[0][0], days[-1][0]
    lines.append(line((f"{'':10}{first}{f' to {last}' if last != first else ''}", "dim")))
    return lines


def daily(days: tuple[tuple[str, float], ...], most: int) -> list[tuple[str, float]]:
    """Return every day from the first to the last, also those without credit; the newest `most`."""
    known: dict[datetime.date, float] = {}
    for text, credit in days:
        try:
            known[datetime.date.fromisoformat(text)] = credit
        except ValueError:
            continue
    if not known:
        return []
    last = max(known)
    count = min((last - min(known)).days + 1, most, _LONGEST_HISTORY_DAYS)
    span = [last - datetime.timedelta(days=back) for back in reversed(range(max(1, count)))]
    return [(day.isoformat(), known.get(day, 0.0)) for day in span]


# ---------------------------------------------------------------- leaderboard

_PEOPLE = (
    Column("", right=True, smallest=3, keep=8),
    Column("name", largest=28, smallest=10, flexible=True, keep=9),
    Column("team", largest=16, smallest=6, flexible=True, keep=2),
    Column("tokens", right=True, keep=5),
    Column("credit", right=True, keep=6),
    Column("", smallest=10, keep=1),
)
_TEAMS = (
    Column("", right=True, smallest=3, keep=8),
    Column("team", largest=28, smallest=10, flexible=True, keep=9),
    Column("people", right=True, keep=3),
    Column("tokens", right=True, keep=5),
    Column("credit", right=True, keep=6),
    Column("", smallest=10, keep=1),
)
_BAR = 14


def leaderboard(model: ClientModel, width: int, height: int) -> list[Line]:
    status = model.status
    if status is None:
        return [EMPTY]
    ranked = sorted(status.leaderboard, key=lambda row: (-row.credit, -row.tokens, row.name))
    if not ranked:
        return [
            heading("People", width),
            line(("  no credit has been counted yet", "dim")),
        ]
    lines = [heading("People", width), *_people(ranked, width)]
    grouped = teams(ranked)
    if grouped:
        lines += [EMPTY, heading("Teams", width)]
        lines += _team_table(grouped, width)
    return lines


def teams(rows: list[LeaderboardRow]) -> list[tuple[str, int, int, float, bool]]:
    """Return (name, people, tokens, credit, yours) of each team, highest credit first."""
    found: dict[str, tuple[int, int, float, bool]] = {}
    for row in rows:
        if row.team:
            people, tokens, credit, yours = found.get(row.team, (0, 0, 0.0, False))
            found[row.team] = (
                people + 1, tokens + row.tokens, credit + row.credit, yours or row.you,
            )  # fmt: skip
    ranked = sorted(found.items(), key=lambda item: (-item[1][2], item[0]))
    return [(name, *sums) for name, sums in ranked]


def _people(rows: list[LeaderboardRow], width: int) -> list[Line]:
    top = rows[0].credit
    cells = [
        (
            line(str(place)),
            line(
                (printable(row.name) + (" (you)" if row.you else ""), "strong" if row.you else "")
            ),
            line((printable(row.team or ""), "dim")),
            line(short_number(row.tokens)),
            line(number(row.credit, 2)),
            bar(row.credit / top if top > 0 else 0.0, _BAR, "good" if row.you else "accent"),
        )
        for place, row in enumerate(rows, 1)
    ]
    return table(_PEOPLE, cells, width)


def _team_table(rows: list[tuple[str, int, int, float, bool]], width: int) -> list[Line]:
    total = sum(credit for _, _, _, credit, _ in rows)
    cells = [
        (
            line(str(place)),
            line((printable(name), "strong" if yours else "")),
            line(str(people)),
            line(short_number(tokens)),
            line(number(credit, 2)),
            line((percent(credit / total if total > 0 else None), "dim")),
        )
        for place, (name, people, tokens, credit, yours) in enumerate(rows, 1)
    ]
    return table(_TEAMS, cells, width)
