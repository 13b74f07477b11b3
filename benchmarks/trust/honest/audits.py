"""Audits of counted cells by the coordinator's core, whose auditors are machines.

Each kind of machine has two peers in a stage. The core draws auditors, decides what a statement
says, whose votes count and what follows; nothing here decides anything.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.trust.honest.machine import Machine
from kits.swarm_world.event_bench import Bench
from swarm_coordinator.core.events import Note, ReceiptsVerified, Send, VerdictRecord
from swarm_coordinator.core.trust.audits import AuditBook, AuditSettings
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import PeerId
from swarm_shared.protocol import Audit, Drop

PEERS = "abcdefghijklmnopqrstuvw"
"""First letters of peers' names."""


@dataclass(slots=True)
class Found:
    """What the audits of one setting have found."""

    audits: int = 0
    """Audited cells."""
    alike: int = 0
    """Statements that agree to the bit."""
    distances: list[float] = field(default_factory=list)
    """Of the statements that do not."""
    lost: int = 0
    """Verdicts, against audited peers or auditors."""
    found: int = 0
    """Verdicts against the audited peer."""
    cleared: int = 0
    """Cells that were taken out again."""
    left_class: int = 0
    """Peers that have left their class."""


class Stage:
    """One stage of a run in the core, with two peers of each kind of machine."""

    def __init__(
        self, stage: int, machines: Mapping[str, Machine], tolerance: float, cells: int, seed: str,
        folder: Path,
    ) -> None:  # fmt: skip
        self._computed = folder / "computed"
        settings = AuditSettings(audit_share=1.0, probation_cells=0, tolerance=tolerance)
        book = AuditBook(settings, random.Random(seed).random)
        self._bench = Bench(audits=book, microbatches=cells, steps=10)
        self._peers = {
            f"{letter}{stage}": kind
            for letter, kind in zip(PEERS, [*machines, *machines], strict=False)
        }
        self._machines = machines
        self._bench.join_all(*self._peers, f"x{1 - stage}")
        self._read = len(self._bench.log)
        self._next = 0

    def peers(self, kind: str) -> list[str]:
        return [peer for peer, own in self._peers.items() if own == kind]

    def report(self, peer: str, microbatch: int, receipts: Mapping[str, Any], found: Found) -> None:
        """A peer counts a cell, and its auditors answer; `receipts` by kind of machine."""
        bench, receipt = self._bench, receipts[self._peers[peer]]
        number, self._next = self._next, self._next + 1
        signed = bench.receipt(
            peer, number, transcript=Transcript(**receipt["transcript"]),
            loss_sum=receipt["loss_sum"],
        )  # fmt: skip
        bench.event(ReceiptsVerified(bench.session(peer), PeerId(peer), (signed,)))
        found.audits += 1
        while self._read < len(bench.log):
            command = bench.log[self._read]
            self._read += 1
            if isinstance(command, Send) and isinstance(command.message, Audit):
                self._answer(command.peer, command.message, microbatch, found)
        log, bench.log, self._read = bench.log, [], 0
        verdicts = bench.records(VerdictRecord, log)
        found.lost += len(verdicts)
        found.found += sum(record.peer == peer for record in verdicts)
        found.cleared += sum(isinstance(one.message, Drop) for one in bench.commands(Send, log))
        found.left_class += sum("left its class" in n.text for n in bench.commands(Note, log))

    def _answer(self, auditor: str, order: Audit, microbatch: int, found: Found) -> None:
        audited, claimed = self._machines[self._peers[order.peer]], None
        if order.comparison is not None:
            audited.ask("show", microbatch=microbatch, path=str(self._computed))
            claimed = order.comparison.claimed.model_dump()
        said = self._machines[self._peers[auditor]].ask(
            "audit", microbatch=microbatch, claimed=claimed,
            computed=None if claimed is None else str(self._computed),
        )  # fmt: skip
        if said["distance"] is not None:
            found.distances.append(said["distance"])
        transcript = Transcript(**said["transcript"])
        found.alike += order.comparison is None and transcript == self._claims(order)
        self._bench.audited(
            auditor, order, transcript, loss_sum=said["loss_sum"], distance=said["distance"]
        )

    def _claims(self, order: Audit) -> Transcript:
        """The transcript of the audited receipt."""
        return self._bench.step().table[order.microbatch, order.stage].transcript


def count_everywhere(
    machines: Mapping[str, Machine], microbatches: Sequence[int], version: int
) -> list[dict[str, Any]]:
    """All machines count the cells of one version; their receipts by microbatch and kind."""
    for machine in machines.values():
        machine.ask("load", version=version)
    return [
        {kind: machine.ask("count", microbatch=number) for kind, machine in machines.items()}
        for number in microbatches
    ]
