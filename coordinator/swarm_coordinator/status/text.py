"""The status document in lines of text: what `swarm-coordinator status` prints."""

from __future__ import annotations

from collections import Counter

from swarm_coordinator.status.document import (
    AdmissionStatus,
    PathRow,
    PeerRow,
    RebalancingStatus,
    RunFigures,
    StageTiming,
    StatusDocument,
    TrustStatus,
)
from swarm_shared.base.text import (
    duration_text,
    excerpt,
    latency_text,
    printable,
    rate_text,
    size_text,
)

DECISIONS_SHOWN = 3
"""The newest rebalancing decisions; the older ones are in the run's log."""
MIN_SHOWN_BYTES_PER_SECOND = 500
"""Rate of a link below which it is not shown; keep-alive traffic stays below."""
SAMPLE_CHARACTERS_SHOWN = 200
CLASSES_SHOWN = 3
"""Classes of arithmetic of one stage, the most frequent ones."""
PATHS_SHOWN = 4
"""Paths of one peer, the busiest ones; `--json` prints all of them."""


def status_lines(document: StatusDocument, now: float) -> list[str]:
    """The status for a person."""
    running = document.running
    if running:
        state = f"running, {document.phase}"
    else:
        state = f"not running (last seen {duration_text(max(0.0, now - document.time))} ago)"
        state += ", finished" if document.finished else ""
    lines = [f"{document.run}: {state}"]
    if running:
        lines.append(f"  health: {document.health.state}. {document.health.sentence}")
    if running and document.waiting_for:
        lines.append(f"  waiting for: {document.waiting_for}")
    step = f"  step {document.version} of {document.steps} applied"
    lines.append(step + (f", loss {document.loss:.4f}" if document.loss is not None else ""))
    if running and document.tokens_per_second:
        lines.append(f"  {document.tokens_per_second:,.0f} tokens/s in the last step")
    if document.heldout_loss is not None:
        lines.append(f"  held-out loss {document.heldout_loss:.4f}")
    lines += evaluation_lines(document)
    checkpoint = document.checkpoint_version
    lines.append(f"  checkpoint: {'none yet' if checkpoint is None else f'step {checkpoint}'}")
    lines += admission_lines(document.admission)
    if running:
        classes = _claimed_classes(document)
        for row in document.stages:
            rate = row.microbatches_per_second
            made = f", {rate:.2f} microbatches/s" if rate else ""
            timing = _stage_timing(document.figures.timing(row.stage))
            lines.append(f"  stage {row.stage}: {row.peers} peer(s){made}{timing}")
            lines += _class_lines(row.stage, classes.get(row.stage, Counter()))
        lines += figure_lines(document.figures)
        lines += rebalancing_lines(document.rebalancing)
        lines += trust_lines(document.trust)
        lines += _peer_lines(document)
    return [printable(line) for line in lines]


def evaluation_lines(document: StatusDocument) -> list[str]:
    """The newest evaluation of a checkpoint, with the beginning of its text."""
    evaluation = document.evaluation
    if evaluation is None:
        return []
    lines: list[str] = []
    if document.heldout_loss is None:
        loss = "–" if evaluation.heldout_loss is None else f"{evaluation.heldout_loss:.4f}"
        lines.append(f"  held-out loss {loss} after step {evaluation.version}")
    if evaluation.sample:
        lines.append(f"  the model writes: {excerpt(evaluation.sample, SAMPLE_CHARACTERS_SHOWN)}")
    return lines


def admission_lines(admission: AdmissionStatus) -> list[str]:
    parts = [f"{admission.members} member(s)"]
    if admission.mode == "token":
        parts.append(f"{admission.valid_tokens} valid token(s)")
    parts.append(f"{len(admission.bans)} banned")
    lines = [f"  admission: {admission.mode}, {', '.join(parts)}"]
    for ban in admission.bans:
        lines.append(f"    banned {ban.peer}" + (f": {ban.reason}" if ban.reason else ""))
    return lines


def figure_lines(figures: RunFigures) -> list[str]:
    """The bubble, and how much work was rejected."""
    lines = []
    if figures.bubble_share is not None:
        lines.append(f"  bubble: the stages are idle for {figures.bubble_share:.0%} of the time")
    rejected = [f"{count} {why}" for why, count in figures.rejected.items() if count]
    if rejected:
        lines.append(f"  rejected since the start: {', '.join(rejected)}")
    return lines


def _stage_timing(timing: StageTiming) -> str:
    text = ""
    if timing.p50_seconds is not None:
        text += f", a microbatch takes {timing.p50_seconds:.3g} s (p95 {timing.p95_seconds:.3g} s)"
    if timing.idle_share is not None:
        text += f", idle {timing.idle_share:.0%}"
    return text


def _claimed_classes(document: StatusDocument) -> dict[int, Counter[str]]:
    """Number of peers by stage and by the class of arithmetic that they claim."""
    classes: dict[int, Counter[str]] = {}
    for peer in document.peers:
        if peer.stage is not None and peer.arithmetic:
            classes.setdefault(peer.stage, Counter())[peer.arithmetic] += 1
    return classes


def _class_lines(stage: int, classes: Counter[str]) -> list[str]:
    """Who of several classes does not compute alike, to the bit; nothing of a single one."""
    if len(classes) < 2:
        return []
    shown = [f"{name} ({peers})" for name, peers in classes.most_common(CLASSES_SHOWN)]
    more = len(classes) - len(shown)
    return [
        f"    {len(classes)} classes of arithmetic among {classes.total()} peers of stage {stage}: "
        f"{', '.join(shown)}{f' and {more} more' if more else ''}"
    ]


def rebalancing_lines(status: RebalancingStatus) -> list[str]:
    """The newest decisions with their reasons and costs, and why no peer moves now."""
    if status.rule == "none":
        return []
    lines = [
        f"  rebalancing: {status.made} move(s) made, {status.on_the_way} in progress, "
        f"{status.dropped} given up, {size_text(status.bytes_moved)} of state transferred"
    ]
    for decision in status.decisions[-DECISIONS_SHOWN:]:
        lines.append(f"    {duration_text(decision.seconds_ago)} ago: {decision.text}")
    if status.reason:
        lines.append(f"    no peer moves now: {status.reason}")
    return lines


def trust_lines(trust: TrustStatus) -> list[str]:
    """How many audits passed and were lost, and the newest lost one."""
    lines = [
        f"  audits: {trust.passed} passed, {trust.lost} lost, {trust.under_way} under way; "
        f"{trust.established} owner(s) established, {trust.on_probation} on probation"
    ]
    for verdict in trust.verdicts[-1:]:
        lines.append(f"    …{verdict.peer[-8:]} lost one: {verdict.reason}")
    return lines


def _peer_lines(document: StatusDocument) -> list[str]:
    names = {peer.peer: peer.name for peer in document.peers}
    paths: dict[str, list[PathRow]] = {}
    for path in document.paths:
        paths.setdefault(path.reporter, []).append(path)

    def named(peer: str) -> str:
        """The end of the ID, which `ban` accepts, and the name that the peer gives itself."""
        if peer == document.coordinator:
            return "the coordinator"
        name, short = names.get(peer), f"…{peer[-8:]}"
        return f"{name} ({short})" if name else short

    def path_text(path: PathRow) -> str:
        """Like "bert relayed via …kR3xTq9a, 84 ms, 1.2 MB/s"."""
        kind = path.kind if path.relay is None else f"{path.kind} via {named(path.relay)}"
        text = f"{named(path.remote)} {kind}"
        if path.rtt_seconds is not None:
            text += f", {latency_text(path.rtt_seconds)}"
        rate = path.bytes_per_second
        return f"{text}, {rate_text(rate)}" if rate >= MIN_SHOWN_BYTES_PER_SECOND else text

    lines = []
    for peer in document.peers:
        lines.append(_peer_line(peer, named(peer.peer)))
        busiest = sorted(
            paths.get(peer.peer, ()), key=lambda path: (-path.bytes_per_second, path.remote)
        )
        if busiest:
            shown = [path_text(path) for path in busiest[:PATHS_SHOWN]]
            more = len(busiest) - len(shown)
            lines.append(f"      links: {'; '.join(shown)}{f'; {more} more' if more else ''}")
    return lines


def _peer_line(peer: PeerRow, name: str) -> str:
    stage = "no stage" if peer.stage is None else f"stage {peer.stage}"
    phase = "paused" if peer.paused else peer.phase
    rate = f"{peer.microbatches_per_second:.2f} microbatches/s"
    arithmetic = f", class {peer.arithmetic}" if peer.arithmetic else ""
    return f"    {name}: {stage}, {phase}, {rate}, {peer.device}{arithmetic}"
