"""The result of a simulation, as a document and as text."""

from __future__ import annotations

from typing import Any

from swarm_coordinator.simulator.audits import audit_lines
from swarm_coordinator.simulator.swarm import Swarm
from swarm_shared.scheduling.placement import MovePolicy

SERIES_POINTS = 600
"""Number of points kept of the rates over time: enough for a plot."""


def outcome_document(swarm: Swarm, inputs: dict[str, Any], wall_seconds: float) -> dict[str, Any]:
    """All figures of a simulation; `inputs` are its parameters, which are included."""
    swarm.meter.account()
    meter, moves = swarm.meter, swarm.run.rebalancing
    policy: MovePolicy = swarm.options.moves.policy
    manifest = swarm.manifest
    steps = swarm.applied
    trained_seconds = meter.seconds
    completed = sum(sum(s.microbatches for s in step.shares if s.stage == 0) for step in steps)
    per_second = completed / trained_seconds if trained_seconds else 0.0
    return {
        **inputs,
        "stages": manifest.stage_count,
        "microbatches_per_step": manifest.training.microbatches_per_step,
        "rebalancing": {"rule": swarm.options.moves.rule.value, "period": policy.period_seconds},
        "simulated_hours": swarm.event_heap.now / 3600,
        "wall_seconds": wall_seconds,
        "events": swarm.events,
        "steps": len(steps),
        "phase": swarm.run.phase.value,
        "waiting_for": swarm.run.waiting_reason,
        "attempts_aborted": swarm.counts["abort"],
        "microbatches_per_second": per_second,
        "tokens_per_second": per_second * manifest.tokens_per_microbatch,
        "pipeline_rate": meter.made / trained_seconds if trained_seconds else 0.0,
        "best_pipeline_rate": meter.possible / trained_seconds if trained_seconds else 0.0,
        "rate_bound": meter.bound / trained_seconds if trained_seconds else 0.0,
        "share_of_bound": meter.made / meter.bound if meter.bound else 0.0,
        "share_of_best": meter.made / meter.possible if meter.possible else 0.0,
        "share_of_placement": completed / meter.made if meter.made else 0.0,
        "standstill_seconds": meter.standstill_seconds,
        "moves": moves.made,
        "moves_decided": moves.decided,
        "moves_dropped": moves.dropped,
        "moved_bytes": moves.bytes_moved,
        "downloaded_bytes": swarm.downloads.bytes,
        "joins": swarm.counts["join"],
        "leaves": swarm.counts["leave"],
        "crashes": swarm.counts["crash"],
        "refused": swarm.counts["refused"],
        "roll_backs": swarm.counts["roll-back"],
        "audits": swarm.audit_log.figures(swarm.run.audits) if swarm.options.audits else None,
        "decisions": [note.text for note in moves.decisions],
        "series": _thinned(meter.series),
    }


def _thinned(series: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    step = max(1, len(series) // SERIES_POINTS)
    return series[::step]


def outcome_lines(document: dict[str, Any]) -> list[str]:
    """The result as lines of text."""
    hours, rule = document["simulated_hours"], document["rebalancing"]
    lines = [
        f"{hours:.1f} hours in {document['wall_seconds']:.1f} s: {document['steps']} steps, "
        f"{document['microbatches_per_second']:.2f} microbatches/s "
        f"({document['tokens_per_second']:,.0f} tokens/s), "
        f"{100 * document['share_of_placement']:.1f} % of its placement's rate",
        f"  volunteers: {document['joins']} joined, {document['leaves']} left, "
        f"{document['crashes']} crashed, {document['refused']} were refused",
        f"  pipeline: {document['pipeline_rate']:.3g} microbatches/s on average while it trained, "
        f"{100 * document['share_of_best']:.2f} % of the best placement's "
        f"{document['best_pipeline_rate']:.3g}; it made no progress for "
        f"{document['standstill_seconds']:.0f} s",
        f"  moves ({rule['rule']}, every {rule['period']:.0f} s): {document['moves']} made of "
        f"{document['moves_decided']} decided, {document['moved_bytes'] / 1e9:.2f} GB for them",
        f"  steps: {document['attempts_aborted']} attempts to close one failed, "
        f"{document['roll_backs']} roll-backs",
    ]
    if document["audits"] is not None:
        lines += audit_lines(document["audits"])
    if not document["steps"]:
        why = f": {document['waiting_for']}" if document["waiting_for"] else ""
        lines.append(f"  no step was made; at the end the run was {document['phase']}{why}")
    if document["decisions"]:
        lines.append("  the last decisions:")
        lines.extend(f"    {text}" for text in document["decisions"][-3:])
    return lines
