"""Audits in a simulated swarm: which machines lie in which cells, and what was found of them.

The draws, votes and verdicts are those of the core. Modelled are the digests: machines with another
`arithmetic` sign other digests of the same gradient, at a distance of rounding; a liar signs
digests of its own, at a distance of 1. A liar states what is right in its own audits, and two liars
never agree. Sums are not modelled.
"""

from __future__ import annotations

import random
import statistics
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from swarm_coordinator.core.events import VerdictRecord
from swarm_coordinator.core.trust.audits import AuditBook
from swarm_coordinator.simulator.fleet import Hardware
from swarm_shared.base.types import MicrobatchIndex, PeerId, Step

ROUNDING = 1e-6
"""Relative distance between the gradients of machines that round differently: two orders of
magnitude below the default tolerance, as measured between kernels of one processor."""

LIE = 1.0
"""Relative distance of a lie, that of a gradient of zeros."""

_FIRST_LIE = 100
"""Lowest variant of a transcript that is a lie; those of honest machines are their `arithmetic`."""
_LIE_VARIANTS = 60_000


def with_liars(
    fleet: Iterable[Hardware], share: float, lies: float, rng: random.Random
) -> list[Hardware]:
    """The fleet with a share of its machines, drawn by `rng`, that lie in `lies` of their cells."""
    machines = list(fleet)
    for index in rng.sample(range(len(machines)), round(share * len(machines))):
        machines[index] = replace(machines[index], lies=lies)
    return machines


def variant_of(peer: PeerId, machine: Hardware, step: Step, microbatch: MicrobatchIndex) -> int:
    """The variant of the transcript that a machine signs of a microbatch."""
    if lies_in(peer, machine, step, microbatch):
        return _FIRST_LIE + zlib.crc32(peer.encode()) % _LIE_VARIANTS
    return machine.arithmetic


def lies_in(peer: PeerId, machine: Hardware, step: Step, microbatch: MicrobatchIndex) -> bool:
    """Whether a machine lies in a cell: always the same answer for the same cell."""
    if not 0 < machine.lies < 1:
        return machine.lies > 0
    return random.Random(f"{peer} {step} {microbatch}").random() < machine.lies


@dataclass(slots=True)
class AuditLog:
    """What the machines of a simulation have signed, and the audits that they have lost."""

    machines: dict[PeerId, Hardware] = field(default_factory=dict)
    """All that have signed a receipt."""
    signed: Counter[PeerId] = field(default_factory=Counter)
    """Number of receipts."""
    verdicts: list[tuple[PeerId, int]] = field(default_factory=list)
    """Peers that have lost an audit, with the place of the audited cell among their own."""
    _places: dict[PeerId, dict[tuple[Step, MicrobatchIndex], int]] = field(default_factory=dict)
    """Places of the cells of liars, counted from 1."""

    def sign(
        self, peer: PeerId, machine: Hardware, step: Step, microbatch: MicrobatchIndex
    ) -> None:
        self.machines[peer] = machine
        self.signed[peer] += 1
        if machine.lies:
            places = self._places.setdefault(peer, {})
            places.setdefault((step, microbatch), len(places) + 1)

    def judged(self, verdict: VerdictRecord) -> None:
        places, microbatch = self._places.get(verdict.peer, {}), verdict.microbatch
        place = 0 if microbatch is None else places.get((verdict.step, microbatch), 0)
        self.verdicts.append((verdict.peer, place))

    def figures(self, book: AuditBook) -> dict[str, Any]:
        """The figures of a simulation's audits."""
        liars = [peer for peer, machine in self.machines.items() if machine.lies]
        found = {peer: place for peer, place in self.verdicts if self.machines[peer].lies}
        false = len(self.verdicts) - len(found)
        ended = book.passed + len(self.verdicts)
        cells = self.signed.total()
        return {
            "passed": book.passed,
            "lost": len(self.verdicts),
            "unanswered": book.unanswered,
            "audited_share": ended / cells if cells else 0.0,
            "false_verdicts": false,
            "false_share": false / ended if ended else 0.0,
            "liars": len(liars),
            "liars_found": len(found),
            "cells_until_found": sorted(found.values()),
            "cells_of_others": sorted(self.signed[peer] for peer in liars if peer not in found),
        }


def audit_lines(figures: dict[str, Any]) -> list[str]:
    """The figures as lines of text."""
    lines = [
        f"  audits: {figures['passed']:,} passed and {figures['lost']} lost, "
        f"{100 * figures['audited_share']:.1f} % of the cells; {figures['unanswered']} found no "
        f"auditor in time; {figures['false_verdicts']} verdicts against honest machines "
        f"({100 * figures['false_share']:.2g} % of the audits)"
    ]
    if figures["liars"]:
        cells = figures["cells_until_found"]
        median = f", the median one in its cell {statistics.median(cells):.0f}" if cells else ""
        lines.append(f"  liars: {len(cells)} of {figures['liars']} found and expelled{median}")
    return lines
