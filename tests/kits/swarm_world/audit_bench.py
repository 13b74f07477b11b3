"""The event bench with audits: which orders were sent, and what their auditors answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kits.swarm_world.event_bench import OTHER_DIGEST, Bench
from swarm_coordinator.core.events import AuditAnswered
from swarm_coordinator.core.trust.audits import AuditBook, AuditSettings
from swarm_coordinator.simulator.transcripts import simulated_transcript
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.protocol import Audit

ALL_CELLS = AuditSettings(audit_share=1.0, probation_cells=0)
NO_CELL = AuditSettings(audit_share=0.0, probation_cells=0)


def draws(*numbers: float) -> Callable[[], float]:
    """Numbers in turn, and the last one for ever."""
    left = list(numbers)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def audited(
    *names: str, settings: AuditSettings = ALL_CELLS, draw: Callable[[], float] = lambda: 0.0,
    **options: Any,
) -> Bench:  # fmt: skip
    """A run in which, by default, every cell is audited."""
    bench = Bench(audits=AuditBook(settings, draw), **options)
    bench.join_all(*(names or ("a0", "b0", "c0", "a1", "b1", "c1")))
    return bench


def orders(bench: Bench) -> dict[str, list[Audit]]:
    """The orders that the last event has sent."""
    return {str(p): sent for p in bench.run.peers if (sent := bench.sent(p, Audit))}


def the_order(bench: Bench) -> tuple[str, Audit]:
    """The only order that the last event has sent."""
    ((auditor, (order,)),) = orders(bench).items()
    return auditor, order


def true(order: Audit, stages: int = 2) -> Transcript:
    """What the audited microbatch gives."""
    return simulated_transcript(order.step, order.microbatch, order.stage, StageIndex(stages - 1))


def false(order: Audit) -> Transcript:
    """The same with another gradient."""
    return true(order).model_copy(update={"gradient": OTHER_DIGEST})


def contradict(bench: Bench, auditor: str, order: Audit, distance: float | None = 1.0) -> None:
    """The auditor finds another gradient, and that it is far from what is claimed."""
    bench.audited(auditor, order, false(order))
    again = bench.sent(auditor, Audit)[-1]
    assert again.comparison is not None
    assert again.comparison.claimed == true(order)
    bench.audited(auditor, again, false(order), distance=distance)


def no_answer(bench: Bench, auditor: str, order: Audit) -> None:
    """The auditor states nothing."""
    bench.event(AuditAnswered(bench.session(auditor), PeerId(auditor), order.audit, None, ""))


def orders_of_log(bench: Bench) -> list[tuple[str, Audit]]:
    """All orders, with their auditors."""
    return [(str(p), order) for p in bench.run.peers for order in bench.sent(p, Audit, bench.log)]
