"""The run for Prometheus: prefix `swarm_`, base units, and never a peer's ID as a label.

`METRICS` lists every name with its meaning; `docs/monitoring` documents them, and a test holds the
two and what is really emitted together. Labels take few values, all of them this program's own
words. Counters that say "since the start" begin at zero with each start of the coordinator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from swarm_coordinator.core.state.utilisation import BOUNDS
from swarm_coordinator.dashboard.api_models import HealthState
from swarm_coordinator.dashboard.database_reader import STEP_SECONDS
from swarm_coordinator.dashboard.snapshot import Snapshot
from swarm_coordinator.status.document import PathRow, RunFigures, StatusDocument

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
    "swarm_status_age_seconds": MetricSpec(GAUGE, "Since the coordinator last said how it stands."),
    "swarm_coordinator_uptime_seconds": MetricSpec(GAUGE, "Since this start of the coordinator."),
    "swarm_applied_steps": MetricSpec(GAUGE, "Optimizer steps in the run's history."),
    "swarm_target_steps": MetricSpec(GAUGE, "Optimizer steps of the whole run."),
    "swarm_checkpoint_step": MetricSpec(GAUGE, "The step of the newest checkpoint; 0 for none."),
    "swarm_rollbacks_total": MetricSpec(COUNTER, "Returns to a checkpoint, ever."),
    "swarm_loss_nats": MetricSpec(GAUGE, "Mean loss per token in the last applied step."),
    "swarm_heldout_loss_nats": MetricSpec(GAUGE, "Mean loss per held-out token, once measured."),
    "swarm_trained_tokens": MetricSpec(GAUGE, "Of all steps in the run's history."),
    "swarm_tokens_per_second": MetricSpec(GAUGE, "In the last applied step."),
    "swarm_step_seconds": MetricSpec(
        HISTOGRAM, "How long the steps took that are in the run's history."
    ),
    "swarm_step_cells_done": MetricSpec(GAUGE, "Microbatches times stages of the step under way."),
    "swarm_step_cells": MetricSpec(GAUGE, "Microbatches times stages of one step."),
    "swarm_microbatches_counted_total": MetricSpec(
        COUNTER, "Microbatches times stages entered since the start."
    ),
    "swarm_microbatches_duplicated_total": MetricSpec(
        COUNTER, "Of these, counted by a second peer too and taken out, since the start."
    ),
    "swarm_microbatches_cleared_total": MetricSpec(
        COUNTER, "Of these, lost with their peer, to be computed again, since the start."
    ),
    "swarm_stage_ready_peers": MetricSpec(GAUGE, "Peers that hold the stage.", ("stage",)),
    "swarm_stage_microbatches_per_second": MetricSpec(
        GAUGE, "Rate of the stage, all of its peers together.", ("stage",)
    ),
    "swarm_stage_microbatch_seconds": MetricSpec(
        HISTOGRAM,
        "How long microbatches took to compute in the stage, since the start.",
        ("stage",),
    ),
    "swarm_stage_held_seconds_total": MetricSpec(
        COUNTER, "Peers' time at the stage while steps were made, since the start.", ("stage",)
    ),
    "swarm_stage_idle_ratio": MetricSpec(
        GAUGE, "Share of that time without anything to compute, in the last minutes.", ("stage",)
    ),
    "swarm_bubble_ratio": MetricSpec(GAUGE, "The same of all stages together."),
    "swarm_rejected_total": MetricSpec(
        COUNTER, "Gradients, states and receipts that did not count, since the start.", ("reason",)
    ),
    "swarm_unreachable_stages": MetricSpec(GAUGE, "Stages without a reachable peer."),
    "swarm_peers": MetricSpec(GAUGE, "Attached peers.", ("phase",)),
    "swarm_peers_reachability": MetricSpec(
        GAUGE, "Attached peers, by whether others can dial them.", ("reachability",)
    ),
    "swarm_flagged_peers": MetricSpec(GAUGE, "Attached peers that have computed something wrong."),
    "swarm_joins_total": MetricSpec(COUNTER, "Peers that came while these pages were served."),
    "swarm_departures_total": MetricSpec(COUNTER, "Peers that went while these pages were served."),
    "swarm_paths": MetricSpec(GAUGE, "Connections between peers, as these report them.", ("kind",)),
    "swarm_path_bytes_per_second": MetricSpec(
        GAUGE, "The highest rates seen lately, added up.", ("kind",)
    ),
    "swarm_sessions": MetricSpec(GAUGE, "Control streams."),
    "swarm_sessions_ended_total": MetricSpec(
        COUNTER, "Control streams that ended without a goodbye, since the start.", ("reason",)
    ),
    "swarm_rebalancing_moves_total": MetricSpec(
        COUNTER, "Moves to another stage since the start.", ("outcome",)
    ),
    "swarm_rebalancing_bytes_total": MetricSpec(
        COUNTER, "State downloaded for moves since the start."
    ),
    "swarm_bans": MetricSpec(GAUGE, "Peers that are banned."),
    "swarm_valid_tokens": MetricSpec(GAUGE, "Invite tokens that still let somebody in."),
    "swarm_contributors": MetricSpec(GAUGE, "People who have counted in any applied step."),
    "swarm_http_requests_total": MetricSpec(
        COUNTER, "Requests answered, by class of status, since these pages began.", ("status",)
    ),
    "swarm_http_failures_total": MetricSpec(
        COUNTER, "What went wrong in serving pages, since these pages began.", ("kind",)
    ),
    "swarm_http_restarts_total": MetricSpec(
        COUNTER, "Times that the process of the pages had to be started again."
    ),
    "swarm_http_connections": MetricSpec(GAUGE, "Open connections to these pages."),
    "swarm_http_event_readers": MetricSpec(GAUGE, "Browsers that follow events live."),
}

Values = Mapping[tuple[str, ...], float]
Buckets = Mapping[tuple[str, ...], tuple[Sequence[float], Sequence[int], float]]
"""Of a histogram, by labels: bounds, counts up to each and of all, and the sum of what was seen."""
PHASES = (
    "waiting for peers", "collecting", "closing", "applying", "evaluating", "stopping", "finished",
)  # fmt: skip


@dataclass(slots=True)
class HttpStatistics:
    """What the pages' process knows about itself."""

    requests: Mapping[str, int]
    failures: Mapping[str, int]
    connections: int
    readers: int
    joined: int
    left: int


def exposition(snapshot: Snapshot, serving: HttpStatistics) -> bytes:
    """The text that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_SnapshotCollector(snapshot, serving))
    return generate_latest(registry)


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
    """By name. Every second bound of a stage's histogram: the others are for quantiles here."""
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
    """By name; what has no value now is left out."""
    return {
        **_of_the_run(snapshot),
        **_of_figures(snapshot.status.figures),
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
        "swarm_run_phase": {(phase,): float(phase == run.phase) for phase in PHASES},
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


def _of_peers(snapshot: Snapshot) -> dict[str, Values]:
    peers, book = snapshot.status.peers, snapshot.database.book
    phases = Counter({"admitted": 0, "syncing": 0, "ready": 0})
    phases.update(peer.phase for peer in peers)
    reachability = Counter({"unknown": 0, "public": 0, "mapped": 0, "behind_nat": 0})
    reachability.update(peer.reachability for peer in peers)
    return {
        "swarm_peers": _labelled(phases),
        "swarm_peers_reachability": _labelled(reachability),
        "swarm_flagged_peers": _one(sum(peer.flagged_times > 0 for peer in peers)),
        "swarm_bans": _one(len(book.bans)),
        "swarm_valid_tokens": _one(sum(token.state == "valid" for token in snapshot.tokens.tokens)),
    }


def _of_paths(paths: Iterable[PathRow]) -> dict[str, Values]:
    count = Counter({"direct": 0, "punched": 0, "relayed": 0})
    rates = dict.fromkeys(count, 0.0)
    for path in paths:
        count[path.kind] += 1
        rates[path.kind] = rates.get(path.kind, 0.0) + path.bytes_per_second
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


def sample_names(name: str) -> Iterable[str]:
    """The names under which a metric's samples are asked for in a query."""
    if METRICS[name].kind == HISTOGRAM:
        return (f"{name}_bucket", f"{name}_count", f"{name}_sum")
    return (name,)
