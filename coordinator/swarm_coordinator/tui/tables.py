"""The rows of the tables of a run, peers, contributors and bans: pure functions of the document.

A cell has the line that is drawn and the value that its column is sorted by. Drawing and sorting
are `tui.table_pane`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm_coordinator.status.document import ContributorRow, PathRow, PeerRow, RunDocument
from swarm_shared.base.text import (
    MISSING,
    duration_text,
    latency_text,
    printable,
    rate_text,
)
from swarm_shared.tui.bars import bar
from swarm_shared.tui.formatting import clock_text, number, peer_text, percent
from swarm_shared.tui.styled_text import EMPTY, Line, line

_BAR = 14


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column's title; numbers stand at the right, and the largest first when it is chosen."""

    title: str
    numbers: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cell shows, and the value that its column is sorted by."""

    shown: Line
    by: float | str


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of one peer or owner."""

    peer: str
    """The whole ID; it distinguishes the rows."""
    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table's columns, its first order and its rows."""

    columns: tuple[TableColumn, ...]
    sorted_by: int
    descending: bool
    rows: Callable[[RunDocument], Sequence[TableRow]]


def name_of(peer: PeerRow | ContributorRow) -> str:
    """Return a peer's own name, if it has one, with the end of its ID."""
    short = peer_text(peer.peer, None)
    return f"{printable(peer.name)} ({short})" if peer.name else short


def _text(text: str) -> Cell:
    return Cell(line(text), text.lower())


def _number(value: float | None, shown: str) -> Cell:
    return Cell(line(shown), -math.inf if value is None else value)


def _peer_rows(run: RunDocument) -> list[TableRow]:
    paths = {path.reporter: path for path in run.paths if path.remote == run.coordinator}
    return [_peer_row(peer, paths.get(peer.peer)) for peer in run.peers]


def _peer_row(peer: PeerRow, path: PathRow | None) -> TableRow:
    stage = "" if peer.stage is None else str(peer.stage)
    phase, device = printable(peer.phase), printable(peer.device)
    arithmetic = printable(peer.arithmetic)
    kind = MISSING if path is None else path.kind
    rtt, rate = (None, None) if path is None else (path.rtt_seconds, path.bytes_per_second)
    name, remark = name_of(peer), _remark(peer)
    return TableRow(
        peer.peer,
        name,
        (
            _text(name),
            # Without a stage last.
            Cell(line(stage), math.inf if peer.stage is None else peer.stage),
            Cell(line((phase, "good" if phase == "ready" else "accent")), phase),
            _number(peer.microbatches_per_second, number(peer.microbatches_per_second, 2)),
            Cell(line((kind, "warn" if kind == "relayed" else "")), kind),
            Cell(remark, "".join(span.text for span in remark)),
            _number(rtt, latency_text(rtt)),
            _number(rate, rate_text(rate)),
            Cell(line((device, "dim")), device),
            Cell(line((arithmetic, "dim")), arithmetic),
        ),
    )


def _remark(peer: PeerRow) -> Line:
    if peer.flagged_times:
        return line((f"flagged {peer.flagged_times}x: {printable(peer.flagged_reason)}", "bad"))
    if peer.leaving:
        return line(("leaving", "warn"))
    if peer.silent_seconds > 3.0:
        return line((f"silent for {duration_text(peer.silent_seconds)}", "warn"))
    return line(("relays for others", "dim")) if peer.offers_relay else EMPTY


PEERS = TableSpec(
    (
        TableColumn("peer"),
        TableColumn("stage"),
        TableColumn("phase"),
        TableColumn("microb./s", numbers=True),
        TableColumn("path"),
        TableColumn("remark"),
        TableColumn("round trip", numbers=True),
        TableColumn("traffic", numbers=True),
        TableColumn("device"),
        TableColumn("class"),
    ),
    sorted_by=1,
    descending=False,
    rows=_peer_rows,
)


def _contributor_rows(run: RunDocument) -> list[TableRow]:
    total = sum(row.tokens for row in run.contributors)
    most = max((row.tokens for row in run.contributors), default=0)
    return [_contributor_row(row, total, most) for row in run.contributors]


def _contributor_row(row: ContributorRow, total: int, most: int) -> TableRow:
    name, stages = name_of(row), sorted(set(row.stages))
    devices = f" ×{row.devices}" if row.devices > 1 else ""
    share = row.tokens / total if total else None
    return TableRow(
        row.peer,
        name,
        (
            Cell(line(name, (devices, "dim")), name.lower()),
            Cell(line(", ".join(map(str, stages))), min(stages, default=-1)),
            _number(row.microbatches, number(row.microbatches)),
            Cell(line((number(row.tokens), "strong")), row.tokens),
            _number(share, percent(share)),
            Cell(bar(row.tokens / most if most else 0.0, _BAR), row.tokens),
        ),
    )


CONTRIBUTORS = TableSpec(
    (
        TableColumn("peer"),
        TableColumn("stages"),
        TableColumn("microbatches", numbers=True),
        TableColumn("tokens", numbers=True),
        TableColumn("of all", numbers=True),
        TableColumn("share", numbers=True),
    ),
    sorted_by=3,
    descending=True,
    rows=_contributor_rows,
)


def _ban_rows(run: RunDocument) -> list[TableRow]:
    names = {row.peer: name_of(row) for row in run.contributors}
    return [
        TableRow(
            ban.peer,
            names.get(ban.peer, peer_text(ban.peer, None)),
            (
                _text(names.get(ban.peer, peer_text(ban.peer, None))),
                Cell(line((clock_text(ban.banned_at), "dim")), ban.banned_at),
                _text(printable(ban.reason)),
                Cell(line((printable(ban.peer), "dim")), ban.peer),
            ),
        )
        for ban in run.admission.bans
    ]


BANS = TableSpec(
    (
        TableColumn("peer"),
        TableColumn("since", numbers=True),
        TableColumn("reason"),
        TableColumn("peer ID"),
    ),
    sorted_by=1,
    descending=True,
    rows=_ban_rows,
)
