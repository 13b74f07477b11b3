"""The lines of each drawn pane of a run: pure functions of the model, a width and a height.

The model is the newest document, and what has changed since the view began.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm_coordinator.status.document import RunDocument, TrustStatus, stage_holders
from swarm_coordinator.tui.tables import name_of
from swarm_shared.base.text import (
    MISSING,
    duration_text,
    excerpt,
    latency_text,
    printable,
    size_text,
)
from swarm_shared.tui.bars import bar, sparkline
from swarm_shared.tui.formatting import (
    clock_text,
    counted,
    number,
    peer_text,
    percent,
    short_number,
)
from swarm_shared.tui.plot import plot
from swarm_shared.tui.stage_bars import StageBar, stage_lines
from swarm_shared.tui.styled_text import EMPTY, Line, Role, beside, heading, joined, line, wrapped
from swarm_shared.tui.table import Column, table
from swarm_shared.tui.time_series import TimeSeries

_NAME = 14
_BAR = 20
_TWO_COLUMNS = 110
_PACE_STEPS = 20
"""Steps that the remaining time is estimated from; a run's pace changes with its volunteers."""


class RunModel:
    """The newest document and what changed since the view began."""

    def __init__(self) -> None:
        self.document: RunDocument | None = None
        self.attached = TimeSeries()
        self.came = 0
        self.went = 0
        """Departures since the view began; with `came`, the churn."""

    def see(self, document: RunDocument) -> None:
        before = self.document
        self.document = document
        if before is not None and before.time == document.time:
            return
        self.attached.add(document.time, float(len(document.peers)))
        if before is not None:
            old, new = ({peer.peer for peer in one.peers} for one in (before, document))
            self.came += len(new - old)
            self.went += len(old - new)

    def seconds_left(self) -> float | None:
        run = self.document
        if run is None or not run.running or not run.history:
            return None
        pace = [row.seconds for row in run.history[-_PACE_STEPS:]]
        return sum(pace) / len(pace) * max(0, run.steps - run.version) or None


def overview(model: RunModel, width: int, height: int) -> list[Line]:
    run = model.document
    if run is None:
        return [EMPTY, line(("  reading the run's folder ...", "dim"))]
    facts = [heading("Run", width), *_progress(model, run, width)]
    stages = [
        heading("Stages", width),
        *stage_lines(_stage_bars(run), width)[: max(2, height // 3)],
    ]
    lines = [*facts, *stages]
    room = max(6, height - len(lines) - 1)
    if width >= _TWO_COLUMNS:
        half = (width - 2) // 2
        curves = beside(_loss_curve(run, half, room), _speed_curve(run, half, room), width)
    elif room >= 14:
        upper = room // 2
        curves = [*_loss_curve(run, width, upper), *_speed_curve(run, width, room - upper)]
    else:
        curves = _loss_curve(run, width, room)
    return [*lines, *curves]


def _named(name: str, *parts: Line) -> Line:
    return (*line((f"  {name:<{_NAME - 2}}", "dim")), *joined(parts, "  "))


def _progress(model: RunModel, run: RunDocument, width: int) -> list[Line]:
    done = run.version / run.steps if run.steps else None
    cells = run.cells_done / run.cells_total if run.cells_total else None
    evaluation = run.evaluation
    heldout = EMPTY if run.heldout_loss is None else line(f"held-out {run.heldout_loss:.4f}")
    if run.heldout_loss is None and evaluation is not None:
        loss = number(evaluation.heldout_loss, 4)
        heldout = line(f"held-out {loss} after step {evaluation.version:,}")
    sample = "" if evaluation is None else excerpt(evaluation.sample, width - _NAME)
    checkpoint = MISSING if run.checkpoint_version is None else f"step {run.checkpoint_version}"
    left = model.seconds_left()
    return [
        _named(
            "steps", bar(done, _BAR), line(f"{run.version:,} of {run.steps:,}"),
            line(f"{duration_text(left)} left") if left else EMPTY,
            line(f"checkpoint {checkpoint}"),
        ),
        _named(
            "this step", bar(cells, _BAR),
            line(f"{run.cells_done:,} of {run.cells_total:,} cells"),
            line((printable(run.phase), "strong")),
        ),
        _named(
            "speed", line((f"{number(run.tokens_per_second)} tokens/s", "strong")),
            line(f"loss {number(run.loss, 4)}"), heldout,
            line(f"up {duration_text(run.uptime_seconds)}"),
        ),
        _named(
            "volunteers", line((f"{len(run.peers)} attached", "strong")),
            line((sparkline(model.attached.values(), 12), "accent")),
            line(f"{model.came} came, {model.went} went while this view is open"),
        ),
        _named(
            "work", line(f"{run.work.counted:,} counted"),
            line(f"{run.work.duplicated:,} twice"), line(f"{run.work.cleared:,} lost and redone"),
        ),
        _named(
            "bubble", bar(run.figures.bubble_share, _BAR),
            line(f"{percent(run.figures.bubble_share)} idle"),
            line(f"{sum(run.figures.rejected.values()):,} rejected"),
        ),
        *([_named("it writes", line(sample))] if sample else []),
    ]  # fmt: skip


def _loss_curve(run: RunDocument, width: int, height: int) -> list[Line]:
    points = [(float(row.step), row.loss) for row in run.history if row.loss is not None]
    curve = plot(points, width, height - 1, label=lambda loss: f"{loss:7.3f}")
    return [heading("Loss by step", width), *curve]


def _speed_curve(run: RunDocument, width: int, height: int) -> list[Line]:
    points = [(float(row.step), row.tokens / row.seconds) for row in run.history if row.seconds > 0]

    def label(rate: float) -> str:
        return f"{short_number(round(rate)):>7}"

    curve = plot(points, width, height - 1, from_zero=True, label=label)
    return [heading("Tokens a second by step", width), *curve]


def _stage_bars(run: RunDocument) -> list[StageBar]:
    peers = stage_holders(run)
    return [
        StageBar(row.stage, peers[row.stage], row.microbatches_per_second) for row in run.stages
    ]


# ---------------------------------------------------------------- stages

_TIMES = (
    Column("stage", right=True, keep=5),
    Column("idle", right=True, keep=3),
    Column("p50", right=True, keep=4),
    Column("p95", right=True, keep=4),
)


def _times(run: RunDocument, width: int) -> list[Line]:
    """Draw the time of a microbatch, and the idle time of the stages."""
    known = [row for row in enumerate(run.figures.stages) if row[1].idle_share is not None]
    if not known:
        return []
    rows = [
        (
            line(str(stage)),
            line(percent(row.idle_share)),
            line(latency_text(row.p50_seconds)),
            line(latency_text(row.p95_seconds)),
        )
        for stage, row in known
    ]
    return [
        heading("Time of a microbatch, and idle time, in the last minutes", width),
        *table(_TIMES, rows, width),
    ]


def pipeline(model: RunModel, width: int, height: int) -> list[Line]:
    run = model.document
    if run is None:
        return [EMPTY]
    return [
        heading("Stages", width),
        *stage_lines(_stage_bars(run), width),
        *_times(run, width),
        heading("Moves between stages", width),
        *_moves(run, width),
    ]


def _moves(run: RunDocument, width: int) -> list[Line]:
    told = run.rebalancing
    if told.rule == "none":
        return [line(("  moves are switched off in run.toml", "dim"))]
    lines = [
        line(
            f"  {told.made} made, {told.on_the_way} on the way, {told.dropped} given up, "
            f"{size_text(told.bytes_moved)} of state for them"
        )
    ]
    for decision in reversed(told.decisions):
        text = f"{duration_text(decision.seconds_ago)} ago: {decision.text}"
        lines += wrapped(printable(text), width - 2, indent="  ")
    if told.reason:
        lines += wrapped(f"no move now: {printable(told.reason)}", width - 2, "dim", "  ")
    return lines


# ---------------------------------------------------------------- events, admission

_BAD_WORDS = ("gone", "failed", "refused", "flagged", "lost", "could not", "goes back", "too late")
_GOOD_WORDS = ("admitted", "is back", "is held again", "finished", "stored")


def events(model: RunModel, width: int, height: int) -> list[Line]:
    run = model.document
    if run is None or not run.notes:
        return [line(("  nothing has happened yet", "dim"))]
    lines = []
    for note in reversed(run.notes):
        text = printable(note.text)
        role: Role = ""
        if any(word in text for word in _BAD_WORDS):
            role = "warn"
        elif any(word in text for word in _GOOD_WORDS):
            role = "good"
        lines.append(line((f"{clock_text(note.written_at)} ", "dim"), (text, role)))
    return lines


def admission(model: RunModel, width: int, height: int) -> list[Line]:
    run = model.document
    if run is None:
        return [EMPTY]
    told = run.admission
    modes = {"open": "every peer with the invite", "token": "every peer with a token",
             "allow-list": "the peers on the list"}  # fmt: skip
    who = modes.get(told.mode, printable(told.mode))
    lines = [
        heading("Admission", width),
        _named("may join", line(who)),
        _named("members", line(str(told.members))),
    ]
    if told.mode == "token":
        lines.append(_named("tokens", line(f"{told.valid_tokens} valid")))
    lines.append(_named("sessions", line(f"{run.sessions} open")))
    lines.append(_named("bans", line(f"{len(told.bans)}")))
    lines += _audits(run.trust, width)
    flagged = [peer for peer in run.peers if peer.flagged_times]
    lines += [EMPTY, heading(f"Flagged for wrong results ({len(flagged)})", width)]
    lines += [
        line(
            f"  {name_of(peer)}",
            (
                f"  {counted(peer.flagged_times, 'time', 'times')}: "
                f"{printable(peer.flagged_reason)}",
                "warn",
            ),
        )
        for peer in flagged
    ] or [line(("  no peer is flagged", "dim"))]
    lines += _ranked("Rejected since the start, by reason", run.figures.rejected, width)
    lines += _ranked("Sessions ended, by reason", run.sessions_ended, width)
    return lines


_OWNERS = (
    Column("owner", largest=36, smallest=10, flexible=True, keep=9),
    Column("passed", right=True, keep=7),
    Column("lost", right=True, keep=6),
    Column("made", right=True, keep=2),
    Column("standing", largest=36, smallest=11, flexible=True, keep=5),
)
_OWNERS_SHOWN = 8


def _audits(trust: TrustStatus, width: int) -> list[Line]:
    rows = [
        (
            line(peer_text(owner.owner, None)),
            line(f"{owner.passed:,}"),
            line((str(owner.lost), "warn" if owner.lost else "")),
            line((f"{owner.made:,}", "dim")),
            line(
                ("established", "good")
                if owner.established
                else f"on probation, {trust.probation_cells - owner.passed} more to pass"
            ),
        )
        for owner in trust.owners[:_OWNERS_SHOWN]
    ]
    return [
        EMPTY,
        heading("Audits", width),
        _named(
            "audits", line(f"{trust.passed:,} passed"),
            line((f"{trust.lost} lost", "warn" if trust.lost else "")),
            line(f"{trust.under_way} under way"),
        ),
        _named(
            "owners", line(f"{trust.established} established, {trust.on_probation} on probation")
        ),
        *(table(_OWNERS, rows, width) if rows else ()),
        *(
            line(f"  …{verdict.peer[-8:]}", (f"  {printable(verdict.reason)}", "warn"))
            for verdict in trust.verdicts[-5:]
        ),
    ]  # fmt: skip


def _ranked(title: str, counts: Mapping[str, int], width: int) -> list[Line]:
    ranked = sorted(((n, why) for why, n in counts.items() if n), key=lambda row: (-row[0], row[1]))
    if not ranked:
        return []
    told = [line(f"  {count:>7,}  {printable(reason)}") for count, reason in ranked]
    return [EMPTY, heading(title, width), *told]
