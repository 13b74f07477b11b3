"""The run's metrics for Prometheus: prefix `swarm_`, base units, and never a peer ID as a label.

Each metric's name, meaning and value stand together. `docs/monitoring` documents them; a test
compares the documentation and what is emitted. Labels take few values, all of them this program's
own. Counters "since the start" begin at zero with each start of the coordinator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from swarm_coordinator.dashboard.database_reader import STEP_SECONDS
from swarm_coordinator.dashboard.snapshot import Snapshot
from swarm_coordinator.status.document import HealthState, RunProgress, StatusDocument
from swarm_shared.protocol import PathKind, Reachability

Buckets = tuple[Sequence[float], Sequence[int], float]
"""A histogram: bounds, cumulative counts (up to each bound, and of all), sum of values."""


@dataclass(slots=True)
class HttpStatistics:
    """Counters of the dashboard's process."""

    requests: Mapping[str, int]
    failures: Mapping[str, int]
    connections: int
    readers: int
    joined: int
    left: int


@dataclass(frozen=True, slots=True)
class RunMetrics(Collector):
    """The metrics of one snapshot."""

    snapshot: Snapshot
    serving: HttpStatistics

    def exposition(self) -> bytes:
        """Encode the metrics in the text format of Prometheus."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        yield from _of_the_run(self.snapshot)
        yield from _of_steps(self.snapshot)
        yield from _of_stages(self.snapshot)
        yield from _of_peers(self.snapshot)
        yield from _of_serving(self.snapshot.status, self.serving)


def _metric(
    name: str, text: str, value: float | None = None, **labelled: Mapping[str, float]
) -> Metric:
    """Make a metric of a value, or of values by a label; without a value now it has no samples."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = kind(name, text, labels=tuple(labelled))
    if value is not None:
        family.add_metric((), value)
    for values in labelled.values():
        for label, one in values.items():
            family.add_metric((label,), one)
    return family


def _histogram(name: str, text: str, buckets: Mapping[tuple[str, ...], Buckets]) -> Metric:
    """Make a histogram of one set of buckets, or of one for each stage."""
    family = HistogramMetricFamily(name, text, labels=() if () in buckets else ("stage",))
    for labels, (bounds, counts, total) in buckets.items():
        ends = [*(str(float(f"{bound:.6g}")) for bound in bounds), "+Inf"]
        family.add_metric(labels, list(zip(ends, counts, strict=True)), sum_value=total)
    return family


def _of_the_run(snapshot: Snapshot) -> Iterator[Metric]:
    run = snapshot.run
    yield _metric(
        "swarm_run_health",
        "1 for the state that the run is in, 0 for every other state.",
        state={state.value: state is run.health.state for state in HealthState},
    )
    yield _metric(
        "swarm_run_phase",
        "1 for the phase the run is in.",
        phase={phase.value: phase == run.phase for phase in RunPhase},
    )
    age = max(0.0, snapshot.taken_at - run.time)
    yield _metric("swarm_status_age_seconds", "Age of the coordinator's status.", age)
    yield _metric(
        "swarm_coordinator_uptime_seconds",
        "Time since this start of the coordinator.",
        run.uptime_seconds,
    )
    yield _metric("swarm_applied_steps", "Optimizer steps in the run's history.", run.version)
    yield _metric("swarm_target_steps", "Optimizer steps of the whole run.", run.steps)
    yield _metric(
        "swarm_checkpoint_step",
        "The step of the newest checkpoint; 0 for none.",
        run.checkpoint_version or 0,
    )
    yield _metric(
        "swarm_rollbacks_total",
        "Rollbacks to a checkpoint, over the whole run.",
        snapshot.database.rollbacks,
    )


def _heldout_loss(run: RunProgress) -> float | None:
    if run.heldout_loss is None and run.evaluation is not None:
        return run.evaluation.heldout_loss
    return run.heldout_loss


def _of_steps(snapshot: Snapshot) -> Iterator[Metric]:
    run, read, work = snapshot.run, snapshot.database, snapshot.status.work
    yield _metric("swarm_loss_nats", "Mean loss per token in the last applied step.", run.loss)
    yield _metric(
        "swarm_heldout_loss_nats",
        "Mean loss per held-out token: at the run's end, before it of an evaluated checkpoint.",
        _heldout_loss(run),
    )
    yield _metric("swarm_trained_tokens", "Tokens of all steps in the run's history.", run.tokens)
    yield _metric(
        "swarm_tokens_per_second",
        "Tokens per second in the last applied step.",
        run.tokens_per_second,
    )
    yield _histogram(
        "swarm_step_seconds",
        "Duration of the steps in the run's history.",
        {(): (STEP_SECONDS, read.durations, read.seconds)},
    )
    yield _metric(
        "swarm_step_cells_done",
        "Microbatches times stages done of the step in progress.",
        run.cells_done,
    )
    yield _metric("swarm_step_cells", "Microbatches times stages of one step.", run.cells_total)
    yield _metric(
        "swarm_microbatches_counted_total",
        "Microbatches times stages counted since the start.",
        work.counted,
    )
    yield _metric(
        "swarm_microbatches_duplicated_total",
        "Microbatches times stages counted twice and taken out, since the start.",
        work.duplicated,
    )
    yield _metric(
        "swarm_microbatches_cleared_total",
        "Microbatches times stages lost with their peer and computed again, since the start.",
        work.cleared,
    )
    yield _metric(
        "swarm_contributors", "Owners with a share in any applied step.", run.contributors
    )


def _of_stages(snapshot: Snapshot) -> Iterator[Metric]:
    figures, trust = snapshot.status.figures, snapshot.status.trust
    rows = {str(row.stage): row for row in snapshot.stages.stages}
    stages = {str(stage): row for stage, row in enumerate(figures.stages)}
    yield _metric(
        "swarm_stage_ready_peers",
        "Peers that hold the stage.",
        stage={stage: row.ready for stage, row in rows.items()},
    )
    yield _metric(
        "swarm_stage_microbatches_per_second",
        "Rate of the stage, all of its peers together.",
        stage={stage: row.microbatches_per_second for stage, row in rows.items()},
    )
    # Every second bound; the other bounds serve the quantiles only.
    counts = {stage: list(accumulate(row.microbatches)) for stage, row in stages.items()}
    yield _histogram(
        "swarm_stage_microbatch_seconds",
        "Computing time of a microbatch in the stage, since the start.",
        {
            (stage,): (BOUNDS[::2], [*those[:-1:2], those[-1]], stages[stage].busy_seconds)
            for stage, those in counts.items()
        },
    )
    yield _metric(
        "swarm_stage_held_seconds_total",
        "Time for which peers held the stage while steps were made, since the start.",
        stage={stage: row.held_seconds for stage, row in stages.items()},
    )
    yield _metric(
        "swarm_stage_idle_ratio",
        "Share of that time without anything to compute, in the last minute or two.",
        stage={n: row.idle_share for n, row in stages.items() if row.idle_share is not None},
    )
    yield _metric(
        "swarm_bubble_ratio", "The idle share over all stages together.", figures.bubble_share
    )
    yield _metric(
        "swarm_audits_passed_total",
        "Microbatches that were computed again and agreed, since the start.",
        trust.passed,
    )
    yield _metric("swarm_audits_lost", "Lost audits of the run.", trust.lost)
    yield _metric(
        "swarm_owners_on_probation",
        "Owners that have not passed their probation.",
        trust.on_probation,
    )
    yield _metric(
        "swarm_rejected_total",
        "Gradients, states and receipts that did not count, since the start.",
        reason=figures.rejected,
    )
    yield _metric(
        "swarm_unreachable_stages",
        "Stages without a reachable peer.",
        len(snapshot.health.unreachable_stages),
    )


def _of_peers(snapshot: Snapshot) -> Iterator[Metric]:
    peers, book = snapshot.status.peers, snapshot.database.book
    phases = Counter({phase.value: 0 for phase in PeerPhase})
    phases.update(peer.phase for peer in peers)
    yield _metric("swarm_peers", "Attached peers.", phase=phases)
    reachability = Counter({one.value: 0 for one in Reachability})
    reachability.update(peer.reachability for peer in peers)
    yield _metric(
        "swarm_peers_reachability",
        "Attached peers, by whether other peers can dial them.",
        reachability=reachability,
    )
    yield _metric(
        "swarm_flagged_peers",
        "Attached peers flagged for wrong results.",
        sum(peer.flagged_times > 0 for peer in peers),
    )
    count = {kind.value: 0 for kind in PathKind}
    rates = {kind.value: 0.0 for kind in PathKind}
    for path in snapshot.status.paths:
        count[path.kind] += 1
        rates[path.kind] += path.bytes_per_second
    yield _metric("swarm_paths", "Connections between peers, as the peers report them.", kind=count)
    yield _metric(
        "swarm_path_bytes_per_second",
        "Sum of the highest recent rates of these connections.",
        kind=rates,
    )
    yield _metric("swarm_bans", "Banned peers.", len(book.bans))
    yield _metric(
        "swarm_valid_tokens",
        "Invite tokens that still admit a peer.",
        sum(token.state == "valid" for token in snapshot.tokens.tokens),
    )


def _of_serving(status: StatusDocument, serving: HttpStatistics) -> Iterator[Metric]:
    moves = status.rebalancing
    yield _metric(
        "swarm_joins_total",
        "Peers that attached, since the start of the dashboard.",
        serving.joined,
    )
    yield _metric(
        "swarm_departures_total",
        "Peers that detached, since the start of the dashboard.",
        serving.left,
    )
    yield _metric("swarm_sessions", "Open control streams.", status.sessions)
    yield _metric(
        "swarm_sessions_ended_total",
        "Control streams that ended without a goodbye, since the start.",
        reason=status.sessions_ended,
    )
    yield _metric(
        "swarm_rebalancing_moves_total",
        "Moves to another stage, since the start.",
        outcome={"made": moves.made, "given up": moves.dropped},
    )
    yield _metric(
        "swarm_rebalancing_bytes_total",
        "State downloaded for moves, since the start.",
        moves.bytes_moved,
    )
    yield _metric(
        "swarm_http_requests_total",
        "Requests answered, by status class, since the start of the dashboard.",
        status=serving.requests,
    )
    yield _metric(
        "swarm_http_failures_total",
        "Failures in serving the dashboard, since its start.",
        kind=serving.failures,
    )
    yield _metric(
        "swarm_http_restarts_total", "Restarts of the dashboard's process.", status.http.restarts
    )
    yield _metric(
        "swarm_http_connections", "Open connections to the dashboard.", serving.connections
    )
    yield _metric("swarm_http_event_readers", "Browsers that receive live events.", serving.readers)
