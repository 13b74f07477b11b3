"""Coverage of the pipeline: a bar per stage, as long as its rate, with the slowest one marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm_shared.tui.bars import bar
from swarm_shared.tui.formatting import counted
from swarm_shared.tui.styled_text import Line, Role, line


@dataclass(frozen=True, slots=True)
class StageBar:
    stage: int
    peers: int
    microbatches_per_second: float
    mine: bool = False


def stage_lines(stages: Sequence[StageBar], width: int) -> list[Line]:
    """Draw the stages. A pipeline is as fast as its slowest stage, so bars are shares of the
    fastest."""
    if not stages:
        return [line(("  no stage is known yet", "dim"))]
    fastest = max(row.microbatches_per_second for row in stages)
    slowest = min(row.microbatches_per_second for row in stages)
    length = max(10, min(40, width - 56))
    lines = []
    for row in stages:
        rate = row.microbatches_per_second
        share = rate / fastest if fastest > 0 else 0.0
        role: Role = "bad" if row.peers == 0 else "accent"
        told = f" {counted(row.peers, 'peer', 'peers'):<9} {rate:6.2f} microbatches/s"
        note = line(("  no peer holds it", "bad")) if row.peers == 0 else ()
        if row.peers and len(stages) > 1 and rate == slowest < fastest:
            note = line(("  slowest", "warn"))
        mark = "  mine" if row.mine else ""
        lines.append(
            (
                *line((f"  {row.stage:>3} ", "strong" if row.mine else "")),
                *bar(share, length, role),
                *line(told),
                *note,
                *line((mark, "strong")),
            )
        )
    return lines
