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
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from swarm_coordinator.core.state.utilisation import BOUNDS
from swarm_coordinator.dashboard.api_models import Word
from swarm_coordinator.dashboard.database_reader import STEP_SECONDS
from swarm_coordinator.dashboard.snapshot import Snapshot, figures_of

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"


@dataclass(frozen=True, slots=True)
class Described:
    kind: str
    text: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, Described] = {
    "swarm_run_health": Described(
        GAUGE, "1 for the word that describes the run now, 0 for the others.", ("word",)
    ),
    "swarm_run_phase": Described(GAUGE, "1 for the phase the run is in.", ("phase",)),
    "swarm_status_age_seconds": Described(GAUGE, "Since the coordinator last said how it stands."),
    "swarm_coordinator_uptime_seconds": Described(GAUGE, "Since this start of the coordinator."),
    "swarm_applied_steps": Described(GAUGE, "Optimizer steps in the run's history."),
    "swarm_target_steps": Described(GAUGE, "Optimizer steps of the whole run."),
    "swarm_checkpoint_step": Described(GAUGE, "The step of the newest checkpoint; 0 for none."),
    "swarm_rollbacks_total": Described(COUNTER, "Returns to a checkpoint, ever."),
    "swarm_loss_nats": Described(GAUGE, "Mean loss per token in the last applied step."),
    "swarm_heldout_loss_nats": Described(GAUGE, "Mean loss per held-out token, once measured."),
    "swarm_trained_tokens": Described(GAUGE, "Of all steps in the run's history."),
    "swarm_tokens_per_second": Described(GAUGE, "In the last applied step."),
    "swarm_step_seconds": Described(
        HISTOGRAM, "How long the steps took that are in the run's history."
    ),
    "swarm_step_cells_done": Described(GAUGE, "Microbatches times stages of the step under way."),
    "swarm_step_cells": Described(GAUGE, "Microbatches times stages of one step."),
    "swarm_microbatches_counted_total": Described(
        COUNTER, "Microbatches times stages entered since the start."
    ),
    "swarm_microbatches_duplicated_total": Described(
        COUNTER, "Of these, counted by a second peer too and taken out, since the start."
    ),
    "swarm_microbatches_cleared_total": Described(
        COUNTER, "Of these, lost with their peer, to be computed again, since the start."
    ),
    "swarm_stage_ready_peers": Described(GAUGE, "Peers that hold the stage.", ("stage",)),
    "swarm_stage_microbatches_per_second": Described(
        GAUGE, "Rate of the stage, all of its peers together.", ("stage",)
    ),
    "swarm_stage_microbatch_seconds": Described(
        HISTOGRAM,
        "How long microbatches took to compute in the stage, since the start.",
        ("stage",),
    ),
    "swarm_stage_held_seconds_total": Described(
        COUNTER, "Peers' time at the stage while steps were made, since the start.", ("stage",)
    ),
    "swarm_stage_idle_ratio": Described(
        GAUGE, "Share of that time without anything to compute, in the last minutes.", ("stage",)
    ),
    "swarm_bubble_ratio": Described(GAUGE, "The same of all stages together."),
    "swarm_rejected_total": Described(
        COUNTER, "Gradients, states and receipts that did not count, since the start.", ("reason",)
    ),
    "swarm_unreachable_stages": Described(GAUGE, "Stages without a reachable peer."),
    "swarm_peers": Described(GAUGE, "Attached peers.", ("phase",)),
    "swarm_peers_reachability": Described(
        GAUGE, "Attached peers, by whether others can dial them.", ("reachability",)
    ),
    "swarm_marked_peers": Described(GAUGE, "Attached peers that have computed something wrong."),
    "swarm_joins_total": Described(COUNTER, "Peers that came while these pages were served."),
    "swarm_departures_total": Described(COUNTER, "Peers that went while these pages were served."),
    "swarm_paths": Described(GAUGE, "Connections between peers, as these report them.", ("kind",)),
    "swarm_path_bytes_per_second": Described(
        GAUGE, "The highest rates seen lately, added up.", ("kind",)
    ),
    "swarm_sessions": Described(GAUGE, "Control streams."),
    "swarm_sessions_ended_total": Described(
        COUNTER, "Control streams that ended without a goodbye, since the start.", ("reason",)
    ),
    "swarm_rebalancing_moves_total": Described(
        COUNTER, "Moves to another stage since the start.", ("outcome",)
    ),
    "swarm_rebalancing_bytes_total": Described(
        COUNTER, "State downloaded for moves since the start."
    ),
    "swarm_bans": Described(GAUGE, "Peers that are banned."),
    "swarm_valid_tokens": Described(GAUGE, "Invite tokens that still let somebody in."),
    "swarm_contributors": Described(GAUGE, "People who have counted in any applied step."),
    "swarm_http_requests_total": Described(
        COUNTER, "Requests answered, by class of status, since these pages began.", ("status",)
    ),
    "swarm_http_failures_total": Described(
        COUNTER, "What went wrong in serving pages, since these pages began.", ("kind",)
    ),
    "swarm_http_restarts_total": Described(
        COUNTER, "Times that the process of the pages had to be started again."
    ),
    "swarm_http_connections": Described(GAUGE, "Open connections to these pages."),
    "swarm_http_event_readers": Described(GAUGE, "Browsers that follow events live."),
}

Values = Mapping[tuple[str, ...], float]
Buckets = Mapping[tuple[str, ...], tuple[Sequence[float], Sequence[int], float]]
"""Of a histogram, by labels: bounds, counts up to each and of all, and the sum of what was seen."""
PHASES = (
    "waiting for peers", "collecting", "closing", "applying", "evaluating", "stopping", "finished",
)  # fmt: skip


@dataclass(slots=True)
class Serving:
    """What the pages' process knows about itself."""

    requests: Mapping[str, int]
    failures: Mapping[str, int]
    connections: int
    readers: int
    joined: int
    left: int


def exposition(snapshot: Snapshot, serving: Serving) -> bytes:
    """The text that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshotted(snapshot, serving))
    return generate_latest(registry)


class _Snapshotted(Collector):
    def __init__(self, snapshot: Snapshot, serving: Serving) -> None:
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

    def _histogram(self, name: str, described: Described) -> Metric:
        family = HistogramMetricFamily(name, described.text, labels=described.labels)
        for labels, (bounds, counts, total) in self._buckets[name].items():
            ends = [*(str(float(f"{bound:.6g}")) for bound in bounds), "+Inf"]
            family.add_metric(labels, list(zip(ends, counts, strict=True)), sum_value=total)
        return family


def buckets_of(snapshot: Snapshot) -> dict[str, Buckets]:
    """By name. Every second bound of a stage's histogram: the others are for quantiles here."""
    read = snapshot.read
    stages: dict[tuple[str, ...], tuple[Sequence[float], Sequence[int], float]] = {}
    for stage, told in enumerate(figures_of(snapshot.status).get("stages", ())):
        counts = list(accumulate(told["microbatches"]))
        stages[str(stage),] = BOUNDS[::2], [*counts[:-1:2], counts[-1]], told["busy_seconds"]
    return {
        "swarm_step_seconds": {(): (STEP_SECONDS, read.durations, read.seconds)},
        "swarm_stage_microbatch_seconds": stages,
    }


def values_of(snapshot: Snapshot, serving: Serving) -> dict[str, Values]:
    """By name; what has no value now is left out."""
    return {
        **_of_the_run(snapshot),
        **_of_figures(figures_of(snapshot.status)),
        **_of_peers(snapshot),
        **_of_paths(snapshot.status),
        **_of_serving(snapshot.status, serving),
    }


def _of_the_run(snapshot: Snapshot) -> dict[str, Values]:
    status, run, read = snapshot.status, snapshot.run, snapshot.read
    work = status["work"]
    return {
        "swarm_run_health": {(word.value,): float(word is run.health.word) for word in Word},
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
        "swarm_microbatches_counted_total": _one(work["counted"]),
        "swarm_microbatches_duplicated_total": _one(work["duplicated"]),
        "swarm_microbatches_cleared_total": _one(work["cleared"]),
        "swarm_stage_ready_peers": {(str(s.stage),): s.ready for s in snapshot.stages.stages},
        "swarm_stage_microbatches_per_second": {
            (str(s.stage),): s.microbatches_per_second for s in snapshot.stages.stages
        },
        "swarm_unreachable_stages": _one(len(run.health.unreachable_stages)),
        "swarm_contributors": _one(run.contributors),
    }


def _of_figures(figures: Mapping[str, Any]) -> dict[str, Values]:
    stages = list(enumerate(figures.get("stages", ())))
    idle = {(str(stage),): told["idle_share"] for stage, told in stages}
    return {
        "swarm_stage_held_seconds_total": {
            (str(stage),): told["held_seconds"] for stage, told in stages
        },
        "swarm_stage_idle_ratio": {labels: i for labels, i in idle.items() if i is not None},
        "swarm_bubble_ratio": _one(figures.get("bubble_share")),
        "swarm_rejected_total": _labelled(figures.get("rejected", {})),
    }


def _of_peers(snapshot: Snapshot) -> dict[str, Values]:
    peers, book = snapshot.status["peers"], snapshot.read.book
    phases = Counter({"admitted": 0, "syncing": 0, "ready": 0})
    phases.update(peer["phase"] for peer in peers)
    reachability = Counter({"unknown": 0, "public": 0, "mapped": 0, "behind_nat": 0})
    reachability.update(peer["reachability"] for peer in peers)
    return {
        "swarm_peers": _labelled(phases),
        "swarm_peers_reachability": _labelled(reachability),
        "swarm_marked_peers": _one(sum("marked" in peer for peer in peers)),
        "swarm_bans": _one(len(book.bans)),
        "swarm_valid_tokens": _one(sum(token.state == "valid" for token in snapshot.tokens.tokens)),
    }


def _of_paths(status: Mapping[str, Any]) -> dict[str, Values]:
    count = Counter({"direct": 0, "punched": 0, "relayed": 0})
    rates = dict.fromkeys(count, 0.0)
    for path in status.get("paths", ()):
        count[path["kind"]] += 1
        rates[path["kind"]] = rates.get(path["kind"], 0.0) + path["bytes_per_second"]
    return {"swarm_paths": _labelled(count), "swarm_path_bytes_per_second": _labelled(rates)}


def _of_serving(status: Mapping[str, Any], serving: Serving) -> dict[str, Values]:
    told = status["rebalancing"]
    return {
        "swarm_joins_total": _one(serving.joined),
        "swarm_departures_total": _one(serving.left),
        "swarm_sessions": _one(status["sessions"]),
        "swarm_sessions_ended_total": _labelled(status["sessions_ended"]),
        "swarm_rebalancing_moves_total": {
            ("made",): told["made"], ("given up",): told["dropped"],
        },
        "swarm_rebalancing_bytes_total": _one(told["bytes_moved"]),
        "swarm_http_requests_total": _labelled(serving.requests),
        "swarm_http_failures_total": _labelled(serving.failures),
        "swarm_http_restarts_total": _one(status.get("http", {}).get("restarts", 0)),
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
