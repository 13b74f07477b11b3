"""The summary of a finished run, as text and as JSON.

Owns the texts, the tables and their arithmetic. Pure: the run's database arrives as a `History`.
Losses are in nats per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swarm_coordinator.demo.churn import Kill, first_counted_step
from swarm_coordinator.demo.progress_line import tokens_per_second
from swarm_coordinator.demo.reference_check import ComparedStep
from swarm_coordinator.status.document import LinkRow
from swarm_coordinator.storage.contributions import StageContribution
from swarm_coordinator.storage.history import History, steps_document
from swarm_shared.base.text import printable
from swarm_shared.base.types import PeerId
from swarm_shared.protocol import (
    CONTROL_PROTOCOL,
    DOCTOR_PROTOCOL,
    STAGE_PROTOCOL,
    TRANSFER_PROTOCOL,
)

CLEARLY_BELOW_NATS = 0.1
"""Nats below the unigram entropy that count as clear. A model of single tokens cannot get below it,
and a tenth of a nat is far outside the noise of the held-out sample."""

SHORT_ID_CHARACTERS = 6
"""Characters shown of the end of a peer ID; all Ed25519 IDs begin alike."""

LINK_ROWS = 3
"""Number of largest links that are listed; the others are summed, because there are n² links and
the summary is to fit a screen."""

SAMPLE_LINES = 8
"""Lines of the sampled text that are shown, for the same reason."""

BYTES_PER_MEGABYTE = 1_000_000

_PROTOCOL_LABELS = {
    CONTROL_PROTOCOL: "control",
    STAGE_PROTOCOL: "activations, gradients",
    TRANSFER_PROTOCOL: "data, checkpoints",
    DOCTOR_PROTOCOL: "reachability",
}


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run: its history, and figures that are not in the database."""

    history: History
    coordinator: PeerId
    unigram_entropy: float
    sample: str
    bytes_per_token: float = 1.0
    """Mean over the held-out text."""
    kill: Kill | None = None
    """None in a run without one."""

    @property
    def joined_step(self) -> int | None:
        """The first step that contains a gradient of the newcomer; None if there is none."""
        return first_counted_step(self.history, self.kill.newcomer) if self.kill else None

    @property
    def heldout_nats_per_byte(self) -> float | None:
        """The held-out loss in the unit in which different tokenizers can be compared."""
        loss = self.history.heldout_loss
        return None if loss is None else loss / self.bytes_per_token


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes sent in one direction over one link."""

    source: PeerId
    target: PeerId
    protocol: str
    bytes: int


def result_document(result: RunResult, compared: Sequence[ComparedStep]) -> dict[str, Any]:
    """Return the document of `demo --json`; a loss that is not finite becomes null."""
    return {
        **steps_document(result.history.steps),
        "heldout_loss": result.history.heldout_loss,
        "heldout_nats_per_byte": result.heldout_nats_per_byte,
        "tokens_per_second": tokens_per_second(result.history.steps),
        "peers": [
            {
                "peer": part.peer,
                "name": part.name,
                "stage": part.stage,
                "microbatches": part.microbatches,
                "tokens": part.tokens,
            }
            for part in result.history.contributions
        ],
        "unigram_entropy": result.unigram_entropy,
        "sample": result.sample,
        "kill": asdict(result.kill) | {"joined_step": result.joined_step} if result.kill else None,
        "reference": {
            "losses": [one.alone if math.isfinite(one.alone) else None for one in compared],
            "equal": all(one.equal for one in compared),
        },
    }


def directed_traffic(links: Sequence[LinkRow]) -> list[Traffic]:
    """Return the traffic by sender and receiver, the largest first.

    Both ends of a link may report it at different moments; the larger count is the later one.
    """
    totals: dict[tuple[PeerId, PeerId, str], int] = {}
    for link in links:
        for key, count in (
            ((link.reporter, link.remote, link.protocol), link.sent),
            ((link.remote, link.reporter, link.protocol), link.received),
        ):
            totals[key] = max(totals.get(key, 0), count)
    # A trainer may use its own stage server, which is not a link.
    found = [
        Traffic(source, target, protocol, count)
        for (source, target, protocol), count in totals.items()
        if count > 0 and source != target
    ]
    return sorted(found, key=lambda one: (-one.bytes, one.source, one.target, one.protocol))


def summary_text(result: RunResult) -> str:
    """Return the summary in a few short blocks."""
    history = result.history
    if not history.steps:
        return "No step was applied, so there is no summary."
    blocks = [
        _figures(result),
        "Who contributed\n" + _contributions(history.contributions),
        "Bytes per link\n" + _links(result),
    ]
    if result.sample:
        blocks.append(
            f"Text sampled from the model after {len(history.steps)} steps\n"
            + _indented(result.sample)
        )
    return "\n\n".join(blocks)


def heldout_verdict(
    heldout_loss: float | None, unigram_entropy: float, bytes_per_token: float = 1.0
) -> str:
    """Compare the held-out loss with the unigram entropy in one sentence."""
    if heldout_loss is None:
        return f"not measured (unigram entropy of the text: {unigram_entropy:.3f})"
    distance = unigram_entropy - heldout_loss
    if distance >= CLEARLY_BELOW_NATS:
        verdict = f"clearly below the text's unigram entropy, {unigram_entropy:.3f}"
    elif distance > 0:
        verdict = f"barely below the text's unigram entropy, {unigram_entropy:.3f}"
    else:
        verdict = f"NOT below the text's unigram entropy, {unigram_entropy:.3f}"
    per_byte = f" ({heldout_loss / bytes_per_token:.3f} a byte)" if bytes_per_token != 1 else ""
    return f"{heldout_loss:.3f}{per_byte}, {verdict}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    """Format a table; the columns in `right` hold numbers and align right."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = [
        "  "
        + "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join(text)


def _figures(result: RunResult) -> str:
    history = result.history
    first, last = history.steps[0], history.steps[-1]
    seconds = sum(step.seconds for step in history.steps)
    lines = [
        ("steps", f"{len(history.steps)} in {seconds:.1f} s"),
        ("loss", f"{first.loss:.3f} at step {first.step}, {last.loss:.3f} at step {last.step}"),
        (
            "held-out loss",
            heldout_verdict(history.heldout_loss, result.unigram_entropy, result.bytes_per_token),
        ),
        ("throughput", f"{tokens_per_second(history.steps):,.0f} tokens/s"),
    ]
    return "\n".join(f"{name:<14} {value}" for name, value in lines)


def _contributions(parts: Sequence[StageContribution]) -> str:
    whole: dict[int, int] = {}
    for part in parts:
        whole[part.stage] = whole.get(part.stage, 0) + part.microbatches
    rows = [
        (
            f"…{part.peer[-SHORT_ID_CHARACTERS:]}",
            printable(part.name or "", ""),
            str(part.stage),
            f"{part.microbatches:,}",
            f"{part.tokens:,}",
            f"{part.microbatches / max(1, whole[part.stage]):.0%}",
            f"{part.first_step}-{part.last_step}",
        )
        for part in parts
    ]
    header = ("peer", "name", "stage", "microbatches", "tokens", "share of stage", "in steps")
    return table(header, rows, right=(2, 3, 4, 5, 6))


def _links(result: RunResult) -> str:
    traffic = directed_traffic(result.history.links)
    if not traffic:
        return "  (no peer has reported any)"
    names = _names(result)
    rows = [
        (names(one.source), names(one.target), protocol_label(one.protocol), _megabytes(one.bytes))
        for one in traffic[:LINK_ROWS]
    ]
    if rest := traffic[LINK_ROWS:]:
        rows.append((f"{len(rest)} more", "", "", _megabytes(sum(one.bytes for one in rest))))
    rows.append(("all", "", "", _megabytes(sum(one.bytes for one in traffic))))
    return table(("from", "to", "what", "MB"), rows, right=(3,))


def _names(result: RunResult) -> Callable[[PeerId], str]:
    """Return a function from a peer to its name, or to the end of its ID."""
    known = {peer: printable(name, "") for peer, name in result.history.names.items() if name}
    known[result.coordinator] = "coordinator"
    return lambda peer: known.get(peer) or f"…{peer[-SHORT_ID_CHARACTERS:]}"


def protocol_label(protocol: str) -> str:
    """Return what a protocol carries; an unknown protocol is shown by its name."""
    return _PROTOCOL_LABELS.get(protocol) or printable(protocol.strip("/"), "")


def _megabytes(count: int) -> str:
    return f"{count / BYTES_PER_MEGABYTE:,.2f}"


def _indented(text: str) -> str:
    """Indent the begin of the sample; characters that are not printable are replaced."""
    lines = text.replace("\t", "    ").splitlines()[:SAMPLE_LINES]
    return "\n".join(f"  | {printable(line)}" for line in lines)
