"""The run's metrics for Prometheus: prefix `swarm_`, base units, and never a peer ID as a label.

`METRICS` lists every name with its meaning. `docs/monitoring` documents them; a test compares the
list, the documentation and what is emitted. Labels take few values, all of them this program's own.
Counters "since the start" begin at zero with each start of the coordinator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from swarm_coordinator.core.state.peers import PeerPhase
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.utilisation import BOUNDS
from swarm_coordinator.dashboard.api_models import HealthState
from swarm_coordinator.dashboard.database_reader import STEP_SECONDS
from swarm_coordinator.dashboard.snapshot import Snapshot
from swarm_coordinator.status.document import PathRow, RunFigures, StatusDocument, TrustStatus
from swarm_shared.protocol import PathKind, Reachability

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    kind: str
    text: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, MetricSpec] = {
    "swarm_run_health": MetricSpec(
        GAUGE, "1 for the state that the run is in, 0 for every other state.", ("state",)
    ),
    "swarm_run_phase": MetricSpec(GAUGE, "1 for the phase the run is in.", ("phase",)),
    "swarm_status_age_seconds": MetricSpec(GAUGE, "Age of the coordinator's status."),
    "swarm_coordinator_uptime_seconds": MetricSpec(
        GAUGE, "Time since this start of the coordinator."
    ),
    "swarm_applied_steps": MetricSpec(GAUGE, "Optimizer steps in the run's history."),
    "swarm_target_steps": MetricSpec(GAUGE, "Optimizer steps of the whole run."),
    "swarm_checkpoint_step": MetricSpec(GAUGE, "The step of the newest checkpoint; 0 for none."),
    "swarm_rollbacks_total": MetricSpec(COUNTER, "Rollbacks to a checkpoint, over the whole run."),
    "swarm_loss_nats": MetricSpec(GAUGE, "Mean loss per token in the last applied step."),
    "swarm_heldout_loss_nats": MetricSpec(
        GAUGE, "Mean loss per held-out token, once it is measured."
    ),
    "swarm_trained_tokens": MetricSpec(GAUGE, "Tokens of all steps in the run's history."),
    "swarm_tokens_per_second": MetricSpec(GAUGE, "Tokens per second in the last applied step."),
    "swarm_step_seconds": MetricSpec(HISTOGRAM, "Duration of the steps in the run's history."),
    "swarm_step_cells_done": MetricSpec(
        GAUGE, "Microbatches times stages done of the step in progress."
    ),
    "swarm_step_cells": MetricSpec(GAUGE, "Microbatches times stages of one step."),
    "swarm_microbatches_counted_total": MetricSpec(
        COUNTER, "Microbatches times stages counted since the start."
    ),
    "swarm_microbatches_duplicated_total": MetricSpec(
        COUNTER, "Microbatches times stages counted twice and taken out, since the start."
    ),
    "swarm_microbatches_cleared_total": MetricSpec(
        COUNTER,
        "Microbatches times stages lost with their peer and computed again, since the start.",
    ),
    "swarm_stage_ready_peers": MetricSpec(GAUGE, "Peers that hold the stage.", ("stage",)),
    "swarm_stage_microbatches_per_second": MetricSpec(
        GAUGE, "Rate of the stage, all of its peers together.", ("stage",)
    ),
    "swarm_stage_microbatch_seconds": MetricSpec(
        HISTOGRAM,
        "Computing time of a microbatch in the stage, since the start.",
        ("stage",),
    ),
    "swarm_stage_held_seconds_total": MetricSpec(
        COUNTER,
        "Time for which peers held the stage while steps were made, since the start.",
        ("stage",),
    ),
    "swarm_stage_idle_ratio": MetricSpec(
        GAUGE,
        "Share of that time without anything to compute, in the last minute or two.",
        ("stage",),
    ),
    "swarm_bubble_ratio": MetricSpec(GAUGE, "The idle share over all stages together."),
    "swarm_audits_passed_total": MetricSpec(
        COUNTER, "Microbatches that were computed again and agreed, since the start."
    ),
    "swarm_audits_lost": MetricSpec(GAUGE, "Lost audits of the run."),
    "swarm_owners_on_probation": MetricSpec(GAUGE, "Owners that have not passed their probation."),
    "swarm_rejected_total": MetricSpec(
        COUNTER, "Gradients, states and receipts that did not count, since the start.", ("reason",)
    ),
    "swarm_unreachable_stages": MetricSpec(GAUGE, "Stages without a reachable peer."),
    "swarm_peers": MetricSpec(GAUGE, "Attached peers.", ("phase",)),
    "swarm_peers_reachability": MetricSpec(
        GAUGE, "Attached peers, by whether other peers can dial them.", ("reachability",)
    ),
    "swarm_flagged_peers": MetricSpec(GAUGE, "Attached peers flagged for wrong results."),
    "swarm_joins_total": MetricSpec(
        COUNTER, "Peers that attached, since the start of the dashboard."
    ),
    "swarm_departures_total": MetricSpec(
        COUNTER, "Peers that detached, since the start of the dashboard."
    ),
    "swarm_paths": MetricSpec(
        GAUGE, "Connections between peers, as the peers report them.", ("kind",)
    ),
    "swarm_path_bytes_per_second": MetricSpec(
        GAUGE, "Sum of the highest recent rates of these connections.", ("kind",)
    ),
    "swarm_sessions": MetricSpec(GAUGE, "Open control streams."),
    "swarm_sessions_ended_total": MetricSpec(
        COUNTER, "Control streams that ended without a goodbye, since the start.", ("reason",)
    ),
    "swarm_rebalancing_moves_total": MetricSpec(
        COUNTER, "Moves to another stage, since the start.", ("outcome",)
    ),
    "swarm_rebalancing_bytes_total": MetricSpec(
        COUNTER, "State downloaded for moves, since the start."
    ),
    "swarm_bans": MetricSpec(GAUGE, "Banned peers."),
    "swarm_valid_tokens": MetricSpec(GAUGE, "Invite tokens that still admit a peer."),
    "swarm_contributors": MetricSpec(GAUGE, "Owners with a share in any applied step."),
    "swarm_http_requests_total": MetricSpec(
        COUNTER,
        "Requests answered, by status class, since the start of the dashboard.",
        ("status",),
    ),
    "swarm_http_failures_total": MetricSpec(
        COUNTER, "Failures in serving the dashboard, since its start.", ("kind",)
    ),
    "swarm_http_restarts_total": MetricSpec(COUNTER, "Restarts of the dashboard's process."),
    "swarm_http_connections": MetricSpec(GAUGE, "Open connections to the dashboard."),
    "swarm_http_event_readers": MetricSpec(GAUGE, "Browsers that receive live events."),
}

Values = Mapping[tuple[str, ...], float]
Buckets = Mapping[tuple[str, ...], tuple[Sequence[float], Sequence[int], float]]
"""Histograms by labels: bounds, cumulative counts (up to each bound, and of all), sum of values."""


@dataclass(slots=True)
class HttpStatistics:
    """Counters of the dashboard's process."""

    requests: Mapping[str, int]
    failures: Mapping[str, int]
    connections: int
    readers: int
    joined: int
    left: int


def exposition(snapshot: Snapshot, serving: HttpStatistics) -> bytes:
    """Encode the metrics in the text format of Prometheus."""
    return generate_latest(_SnapshotCollector(snapshot, serving))


class _SnapshotCollector(Collector):
    def __init__(self, snapshot: Snapshot, serving: HttpStatistics) -> None:
        self._values = values_of(snapshot, serving)
        self._buckets = buckets_of(snapshot)

    def collect(self) -> Iterator[Metric]:
        for name, described in METRICS.items():
            if described.kind == HISTOGRAM:
                yield self._histogram(name, described)
                continue
            family = (
                GaugeMetricFamily(name, described.text, labels=described.labels)
                if described.kind == GAUGE
                else CounterMetricFamily(name, described.text, labels=described.labels)
            )
            for labels, value in self._values[name].items():
                family.add_metric(labels, value)
            yield family

    def _histogram(self, name: str, described: MetricSpec) -> Metric:
        family = HistogramMetricFamily(name, described.text, labels=described.labels)
        for labels, (bounds, counts, total) in self._buckets[name].items():
            ends = [*(str(float(f"{bound:.6g}")) for bound in bounds), "+Inf"]
            family.add_metric(labels, list(zip(ends, counts, strict=True)), sum_value=total)
        return family


def buckets_of(snapshot: Snapshot) -> dict[str, Buckets]:
    """Histograms by name, with every second bound; the other bounds serve the quantiles only."""
    read = snapshot.database
    stages: dict[tuple[str, ...], tuple[Sequence[float], Sequence[int], float]] = {}
    for stage, figures in enumerate(snapshot.status.figures.stages):
        counts = list(accumulate(figures.microbatches))
        stages[str(stage),] = BOUNDS[::2], [*counts[:-1:2], counts[-1]], figures.busy_seconds
    return {
        "swarm_step_seconds": {(): (STEP_SECONDS, read.durations, read.seconds)},
        "swarm_stage_microbatch_seconds": stages,
    }


def values_of(snapshot: Snapshot, serving: HttpStatistics) -> dict[str, Values]:
    """Values by name; a metric without a value now is left out."""
    return {
        **_of_the_run(snapshot),
        **_of_figures(snapshot.status.figures),
        **_of_trust(snapshot.status.trust),
        **_of_peers(snapshot),
        **_of_paths(snapshot.status.paths),
        **_of_serving(snapshot.status, serving),
    }


def _of_the_run(snapshot: Snapshot) -> dict[str, Values]:
    status, run, read = snapshot.status, snapshot.run, snapshot.database
    return {
        "swarm_run_health": {
            (state.value,): float(state is run.health.state) for state in HealthState
        },
        "swarm_run_phase": {(phase,): float(phase == run.phase) for phase in RunPhase},
        "swarm_status_age_seconds": _one(max(0.0, snapshot.taken_at - run.time)),
        "swarm_coordinator_uptime_seconds": _one(run.uptime_seconds),
        "swarm_applied_steps": _one(run.version),
        "swarm_target_steps": _one(run.steps),
        "swarm_checkpoint_step": _one(run.checkpoint_version or 0),
        "swarm_rollbacks_total": _one(read.rollbacks),
        "swarm_loss_nats": _one(run.loss),
        "swarm_heldout_loss_nats": _one(run.heldout_loss),
        "swarm_trained_tokens": _one(run.tokens),
        "swarm_tokens_per_second": _one(run.tokens_per_second),
        "swarm_step_cells_done": _one(run.cells_done),
        "swarm_step_cells": _one(run.cells_total),
        "swarm_microbatches_counted_total": _one(status.work.counted),
        "swarm_microbatches_duplicated_total": _one(status.work.duplicated),
        "swarm_microbatches_cleared_total": _one(status.work.cleared),
        "swarm_stage_ready_peers": {(str(s.stage),): s.ready for s in snapshot.stages.stages},
        "swarm_stage_microbatches_per_second": {
            (str(s.stage),): s.microbatches_per_second for s in snapshot.stages.stages
        },
        "swarm_unreachable_stages": _one(len(run.health.unreachable_stages)),
        "swarm_contributors": _one(run.contributors),
    }


def _of_figures(figures: RunFigures) -> dict[str, Values]:
    stages = list(enumerate(figures.stages))
    idle = {(str(stage),): row.idle_share for stage, row in stages}
    return {
        "swarm_stage_held_seconds_total": {
            (str(stage),): row.held_seconds for stage, row in stages
        },
        "swarm_stage_idle_ratio": {labels: i for labels, i in idle.items() if i is not None},
        "swarm_bubble_ratio": _one(figures.bubble_share),
        "swarm_rejected_total": _labelled(figures.rejected),
    }


def _of_trust(trust: TrustStatus) -> dict[str, Values]:
    return {
        "swarm_audits_passed_total": _one(trust.passed),
        "swarm_audits_lost": _one(trust.lost),
        "swarm_owners_on_probation": _one(trust.on_probation),
    }


def _of_peers(snapshot: Snapshot) -> dict[str, Values]:
    peers, book = snapshot.status.peers, snapshot.database.book
    phases = Counter({phase.value: 0 for phase in PeerPhase})
    phases.update(peer.phase for peer in peers)
    reachability = Counter({one.value: 0 for one in Reachability})
    reachability.update(peer.reachability for peer in peers)
    return {
        "swarm_peers": _labelled(phases),
        "swarm_peers_reachability": _labelled(reachability),
        "swarm_flagged_peers": _one(sum(peer.flagged_times > 0 for peer in peers)),
        "swarm_bans": _one(len(book.bans)),
        "swarm_valid_tokens": _one(sum(token.state == "valid" for token in snapshot.tokens.tokens)),
    }


def _of_paths(paths: Iterable[PathRow]) -> dict[str, Values]:
    count = {kind.value: 0 for kind in PathKind}
    rates = {kind.value: 0.0 for kind in PathKind}
    for path in paths:
        count[path.kind] += 1
        rates[path.kind] += path.bytes_per_second
    return {"swarm_paths": _labelled(count), "swarm_path_bytes_per_second": _labelled(rates)}


def _of_serving(status: StatusDocument, serving: HttpStatistics) -> dict[str, Values]:
    rebalancing = status.rebalancing
    return {
        "swarm_joins_total": _one(serving.joined),
        "swarm_departures_total": _one(serving.left),
        "swarm_sessions": _one(status.sessions),
        "swarm_sessions_ended_total": _labelled(status.sessions_ended),
        "swarm_rebalancing_moves_total": {
            ("made",): rebalancing.made, ("given up",): rebalancing.dropped,
        },
        "swarm_rebalancing_bytes_total": _one(rebalancing.bytes_moved),
        "swarm_http_requests_total": _labelled(serving.requests),
        "swarm_http_failures_total": _labelled(serving.failures),
        "swarm_http_restarts_total": _one(status.http.restarts),
        "swarm_http_connections": _one(serving.connections),
        "swarm_http_event_readers": _one(serving.readers),
    }  # fmt: skip


def _one(value: float | None) -> Values:
    return {} if value is None else {(): float(value)}


def _labelled(values: Mapping[str, float]) -> Values:
    return {(label,): float(value) for label, value in values.items()}
