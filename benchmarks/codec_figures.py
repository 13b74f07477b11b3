"""Tables of docs/benchmarks.md: what codecs take and give, and what they cost in loss."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks import agreement
from benchmarks.codecs import HEAD, RESULTS, average_rows_of, cost_of, rows_of
from benchmarks.quality import package_table
from swarm_shared.codecs.choice import MEGABIT_BYTES, choose

LINES_MBIT = (5, 20, 100, 1000, 10_000)
BUDGETS = (0.0005, 0.005, 0.03)


def codecs_markdown(document: Mapping[str, Any]) -> str:
    """Time, bytes and error of each codec, ours and hivemind's."""
    machine = document["machine"]
    shape = " x ".join(f"{size:,}" for size in document["shape"])
    lines = [
        f"{document['measured_at'][:10]}, one thread of {machine['processor']}, load "
        f"{document['load_before']:.1f} before, torch {machine['packages']['torch']}; medians of "
        f"{document['repetitions']}. A hidden state of preset `{document['preset']}` ({shape}, "
        "float32).",
        "",
        f"| {' | '.join(HEAD)} |",
        "|---|---:|---:|---:|---:|---:|",
        *(f"| {' | '.join(row)} |" for row in rows_of(dict(document))),
    ]
    return "\n".join(lines)


def averages_markdown(document: Mapping[str, Any]) -> str:
    """The same of the all-reduce's."""
    lines = [
        f"The same run; {document['average_elements']:,} elements in pieces of 1 MiB, one thread.",
        "",
        f"| {' | '.join(HEAD[:-1])} |",
        "|---|---:|---:|---:|---:|",
        *(f"| {' | '.join(row)} |" for row in average_rows_of(document["averages"])),
    ]
    return "\n".join(lines)


def agreement_markdown(document: Mapping[str, Any]) -> str:
    """How far real runs are from the reference."""
    machine = document["machine"]
    head = agreement.HEAD
    lines = [
        f"{document['measured_at'][:10]}, {machine['cpu_count']} cores ({machine['processor']}), "
        f"load {document['load_before']:.1f} before; {document['stages']} stages with "
        f"{document['peers_per_stage']} peers each, {document['steps']} steps, one run per codec.",
        "",
        f"| {' | '.join(head)} |",
        f"|---|---|{'---:|' * (len(head) - 2)}",
        *(f"| {' | '.join(row)} |" for row in agreement.rows_of(document)),
    ]
    return "\n".join(lines)


def quality_markdown(document: Mapping[str, Any]) -> str:
    """Final held-out loss by pair of codecs, against none."""
    settings, seeds = document["settings"], document["seeds"]
    pairs: Mapping[str, Mapping[str, Any]] = document["pairs"]
    whole = next(iter(pairs.values()))["bytes_per_microbatch"]
    lines = [
        f"{document['measured_at'][:10]}: {document['steps']} steps of "
        f"{document['tokens_per_step']:,} tokens of the demo's data, width "
        f"{settings['model.hidden_size']}, {settings['model.layers']} layers in "
        f"{document['stages']} stages, float32, {len(seeds)} seeds. Losses are held-out, in nats "
        "per token.",
        "",
        "| activation / gradient | times smaller | loss, mean | gap, mean | its spread "
        "| worse with every seed | within the noise |",
        "|---|---:|---:|---:|---:|---|---|",
    ]
    baseline = next(iter(pairs.values()))["losses"]
    for name, one in pairs.items():
        gaps = [loss - base for loss, base in zip(one["losses"], baseline, strict=True)]
        lines.append(
            f"| {name} | {whole / one['bytes_per_microbatch']:.2f} "
            f"| {statistics.mean(one['losses']):.4f} | {one['gap_mean']:+.4f} "
            f"({one['gap_relative']:+.2%}) | {one['gap_spread']:.4f} "
            f"| {'yes' if min(gaps) > 0 else 'no'} "
            f"| {'yes' if one['within_noise'] else 'no'} |"
        )
    lines += [
        "",
        f"The noise, the standard deviation from seed to seed without codecs, is "
        f"{document['noise']:.4f}; the cheapest pair whose mean gap is within it is "
        f"**{document['cheapest_within_noise']}**.",
        "",
        *_choices(document, json.loads((RESULTS / "codecs.json").read_text())),
    ]
    return "\n".join(lines)


def _choices(quality: Mapping[str, Any], codecs: Mapping[str, Any]) -> list[str]:
    """The fastest pair per line and accepted loss."""
    pairs = package_table(quality).pairs
    costs = {name: cost_of(one) for name, one in codecs["codecs"].items()}
    lines = [
        "Fastest pair by the line's rate each way and by the largest gap that one accepts, from "
        "both tables:",
        "",
        "| line | " + " | ".join(f"gap up to {budget:.2%}" for budget in BUDGETS) + " |",
        "|---:|" + "---|" * len(BUDGETS),
    ]
    for rate in LINES_MBIT:
        chosen = (choose(pairs, costs, rate * MEGABIT_BYTES, budget) for budget in BUDGETS)
        lines.append(f"| {rate:,} Mbit/s | " + " | ".join(str(name) for name in chosen) + " |")
    return lines
