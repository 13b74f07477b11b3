"""Tables of docs/benchmarks.md: what codecs take and give, and what they cost in loss."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.codecs import HEAD, rows_of


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
        "| within the noise |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for name, one in pairs.items():
        lines.append(
            f"| {name} | {whole / one['bytes_per_microbatch']:.2f} "
            f"| {statistics.mean(one['losses']):.4f} | {one['gap_mean']:+.4f} "
            f"({one['gap_relative']:+.2%}) | {one['gap_spread']:.4f} "
            f"| {'yes' if one['within_noise'] else 'no'} |"
        )
    lines += [
        "",
        f"The noise, the standard deviation from seed to seed without codecs, is "
        f"{document['noise']:.4f}; the cheapest pair whose mean gap is within it is "
        f"**{document['cheapest_within_noise']}**.",
    ]
    return "\n".join(lines)
