"""Codec tables of docs/benchmarks.md: cost, compression, error, and effect on the loss."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks import agreement
from benchmarks.codecs import HEAD, average_rows_of, cost_of, rows_of
from benchmarks.markdown import markdown_table
from benchmarks.quality import package_table
from swarm_shared.codecs.choice import MEGABIT_BYTES, choose

LINK_RATES_MBIT = (5, 20, 100, 1000, 10_000)
LOSS_BUDGETS = (0.0005, 0.005, 0.03)
"""Largest accepted gap of the loss, relative."""


def codecs_markdown(document: Mapping[str, Any]) -> str:
    """Time, size and error of each codec, the project's and hivemind's."""
    machine = document["machine"]
    shape = " x ".join(f"{size:,}" for size in document["shape"])
    head = (
        f"{document['measured_at'][:10]}, one thread of {machine['processor']}, load "
        f"{document['load_before']:.1f} before, torch {machine['packages']['torch']}; medians of "
        f"{document['repetitions']}. A hidden state of preset `{document['preset']}` ({shape}, "
        "float32)."
    )
    return "\n".join([head, "", *markdown_table(HEAD, "lrrrrr", rows_of(dict(document)))])


def averages_markdown(document: Mapping[str, Any]) -> str:
    """Time, size and error of each codec of the all-reduce."""
    head = (
        f"The same run; {document['average_elements']:,} elements in pieces of 1 MiB, one thread."
    )
    rows = average_rows_of(document["averages"])
    return "\n".join([head, "", *markdown_table(HEAD[:-1], "lrrrr", rows)])


def agreement_markdown(document: Mapping[str, Any]) -> str:
    """Distance of real runs from the reference."""
    machine = document["machine"]
    head = (
        f"{document['measured_at'][:10]}, {machine['cpu_count']} cores ({machine['processor']}), "
        f"load {document['load_before']:.1f} before; {document['stages']} stages with "
        f"{document['peers_per_stage']} peers each, {document['steps']} steps, one run per codec."
    )
    rows = agreement.rows_of(document)
    return "\n".join([head, "", *markdown_table(agreement.HEAD, "llrrrr", rows)])


def quality_markdown(document: Mapping[str, Any], codecs: Mapping[str, Any]) -> str:
    """Held-out loss per pair of codecs, and the fastest pair per link rate and loss budget."""
    settings = document["settings"]
    pairs: Mapping[str, Mapping[str, Any]] = document["pairs"]
    baseline = next(iter(pairs.values()))
    rows = []
    for name, one in pairs.items():
        gaps = [loss - base for loss, base in zip(one["losses"], baseline["losses"], strict=True)]
        rows.append((
            name,
            f"{baseline['bytes_per_microbatch'] / one['bytes_per_microbatch']:.2f}",
            f"{statistics.mean(one['losses']):.4f}",
            f"{one['gap_mean']:+.4f} ({one['gap_relative']:+.2%})",
            f"{one['gap_spread']:.4f}",
            "yes" if min(gaps) > 0 else "no",
            "yes" if one["within_noise"] else "no",
        ))  # fmt: skip
    columns = (
        "activation / gradient", "compression", "mean loss", "mean gap", "spread of the gap",
        "worse with every seed", "within the noise",
    )  # fmt: skip
    lines = [
        f"{document['measured_at'][:10]}: {document['steps']} steps of "
        f"{document['tokens_per_step']:,} tokens of the demo's data, width "
        f"{settings['model.hidden_size']}, {settings['model.layers']} layers in "
        f"{document['stages']} stages, float32, {len(document['seeds'])} seeds. Held-out loss in "
        "nats per token.",
        "",
        *markdown_table(columns, "lrrrrll", rows),
        "",
        "The noise, the standard deviation over the seeds without codecs, is "
        f"{document['noise']:.4f}; the smallest pair whose mean gap is within it is "
        f"**{document['cheapest_within_noise']}**.",
        "",
        "Fastest pair by link rate (each direction) and largest accepted gap, from both tables:",
        "",
        *_choices(document, codecs),
    ]
    return "\n".join(lines)


def _choices(quality: Mapping[str, Any], codecs: Mapping[str, Any]) -> list[str]:
    pairs = package_table(quality).pairs
    costs = {name: cost_of(one) for name, one in codecs["codecs"].items()}
    rows = [
        [
            f"{rate:,} Mbit/s",
            *(str(choose(pairs, costs, rate * MEGABIT_BYTES, budget)) for budget in LOSS_BUDGETS),
        ]
        for rate in LINK_RATES_MBIT
    ]
    columns = ["link", *(f"gap up to {budget:.2%}" for budget in LOSS_BUDGETS)]
    return markdown_table(columns, "rlll", rows)
