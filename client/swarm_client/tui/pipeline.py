"""The second pane: peers and their stages, the flow of microbatches, and moves with their
reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm_client.tui.model import ClientModel
from swarm_shared.base.text import latency_text, printable, rate_text
from swarm_shared.tui.bars import sparkline
from swarm_shared.tui.formatting import number, peer_text
from swarm_shared.tui.stage_bars import StageBar, stage_lines
from swarm_shared.tui.styled_text import EMPTY, Line, Role, heading, line, wrapped
from swarm_shared.tui.table import Column, table

if TYPE_CHECKING:
    from swarm_client.control.status_document import PeerView, Status

PATH_ROLES: dict[str, Role] = {
    "direct": "good", "punched": "good", "relayed": "warn", "own": "strong",
}  # fmt: skip

_COLUMNS = (
    Column("stage", right=True, keep=5),
    Column("peer", largest=24, smallest=10, flexible=True, keep=9),
    Column("microb./s", right=True, keep=4),
    Column("path", keep=6),
    Column("round trip", right=True, keep=2),
    Column("traffic", right=True, keep=3),
)


def pipeline(model: ClientModel, width: int, height: int) -> list[Line]:
    status = model.status
    if status is None:
        return [EMPTY]
    lines = [
        heading("Stages", width),
        *stage_lines(_bars(status), width),
        heading("Microbatches through this machine", width),
        *_flow(model, status, width),
        heading(f"Peers ({len(status.peers)})", width),
        *_peers(status, width),
    ]
    told = status.run.rebalancing if status.run is not None else ()
    lines.append(heading("Moves between stages", width))
    for sentence in reversed(told):
        lines += wrapped(printable(sentence), width - 2, indent="  ")
    if not told:
        lines.append(line(("  no recent moves", "dim")))
    return lines


def _bars(status: Status) -> list[StageBar]:
    mine = {device.stage for device in status.devices}
    return [
        StageBar(row.stage, row.peers, row.microbatches_per_second, mine=row.stage in mine)
        for row in status.stages
    ]


def _flow(model: ClientModel, status: Status, width: int) -> list[Line]:
    """Draw what waits here and what passes through."""
    lines = []
    for device in status.devices:
        before = "tokens" if device.stage == 0 else f"stage {(device.stage or 0) - 1}"
        last = bool(status.stages) and device.stage == status.stages[-1].stage
        after = "loss" if last else f"stage {(device.stage or 0) + 1}"
        if device.stage is None:
            lines.append(line(f"  {printable(device.id)}: no stage"))
            continue
        waiting = "▪" * min(device.queued, 24)
        lines.append(
            line(
                f"  {before} → ",
                (f"{waiting or '·'} ", "accent"),
                f"{device.queued} queued → ",
                (f"stage {device.stage} on {printable(device.id)}", "strong"),
                f" {device.microbatches_per_second:.2f}/s → {after}",
            )
        )
    spark = max(8, min(48, width - 20))
    lines.append(line(("  queued    ", "dim"), (sparkline(model.queued.values(), spark), "accent")))
    lines.append(
        line(("  computed  ", "dim"), (sparkline(model.own_rate.values(), spark), "accent"))
    )
    return lines


def _peers(status: Status, width: int) -> list[Line]:
    if not status.peers:
        return [line(("  no other peer is known yet", "dim"))]

    def order(peer: PeerView) -> tuple[int, int, str]:
        return (peer.stage is None, peer.stage or 0, peer.peer)

    rows = [
        (
            line("" if peer.stage is None else str(peer.stage)),
            line((peer_text(peer.peer, peer.name), "strong" if peer.path == "own" else "")),
            line(number(peer.microbatches_per_second, 2)),
            line(_path(peer)),
            line(latency_text(peer.rtt_seconds)),
            line(rate_text(peer.bytes_per_second)),
        )
        for peer in sorted(status.peers, key=order)
    ]
    return table(_COLUMNS, rows, width)


def _path(peer: PeerView) -> tuple[str, Role]:
    if peer.path is None:
        return "no link", "dim"
    word = "this machine" if peer.path == "own" else printable(peer.path)
    return word, PATH_ROLES.get(peer.path, "")
