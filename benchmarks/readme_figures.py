"""Puts measured tables into README.md, each between its two marks.

.venv/bin/python -m benchmarks.readme_figures benchmarks/results/throughput-small.json
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

README = Path(__file__).parents[1] / "README.md"


@click.command()
@click.argument("result", type=click.Path(path_type=Path, exists=True))
def main(result: Path) -> None:
    """Rewrite the figures of README.md from RESULT, a file that a benchmark wrote."""
    document = json.loads(result.read_text())
    if "links" in document:
        mark, block = "net figures", net_markdown(document)
    else:
        mark, block = "figures", figures_markdown(document)
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    changed, count = re.subn(
        f"{begin}.*{end}", lambda _: f"{begin}\n{block}\n{end}", README.read_text(), flags=re.DOTALL
    )
    if count != 1:
        raise click.ClickException(f"{README} has no marks {begin} and {end}")
    README.write_text(changed)


def figures_markdown(document: Mapping[str, Any]) -> str:
    """A table with the medians, and under what circumstances they were measured."""
    machine, model = document["machine"], document["model"]
    ratios: Mapping[str, float] = document["ratios"]
    lines = [
        f"Median of {document['repetitions']} interleaved repetitions, "
        f"{document['measured_at'][:10]}: {machine['cpu_count']} cores "
        f"({machine['processor']}), torch {machine['packages']['torch']}, everything on one "
        f"machine over loopback. Preset `{document['preset']}`: width {model['hidden_size']}, "
        f"{model['layers']} layers, vocabulary {model['vocabulary_size']}, "
        f"{document['microbatches_per_step']} microbatches of "
        f"{document['sequences_per_microbatch']} x {model['sequence_length']} tokens, float32.",
        "",
        "| | compute processes x threads | tokens/s | over one torch process | "
        "over torch 1F1B with as many processes |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, one in document["contenders"].items():
        processes = one["compute_processes"]
        lines.append(
            f"| {one['name']} | {processes} x {one['threads_per_process']} "
            f"| {one['tokens_per_second_median']:,.0f} "
            f"| {_ratio(ratios.get(f'{name} / torch'))} "
            f"| {_ratio(ratios.get(f'{name} / 1f1b-{processes}'))} |"
        )
    lines += [
        "",
        "`make bench` measures again; every single repetition is in `benchmarks/results/`.",
    ]
    return "\n".join(lines)


def net_markdown(document: Mapping[str, Any]) -> str:
    """Links behind NAT: rates, what they cost, and how long joining takes."""
    machine, joined = document["machine"], document["first_receipt_seconds"]
    lines = [
        f"{document['measured_at'][:10]}, {machine['cpu_count']} cores ({machine['processor']}) "
        "that senders, relay and receivers share; machines and routers are network namespaces, "
        "so the wire costs nothing. Medians.",
        "",
        "| links x at once | MB/s together | CPU s/GB: senders | relay | receivers |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, link in document["links"].items():
        cpu = (link[f"{part}_cpu_seconds_per_gb"] for part in ("senders", "relay", "receivers"))
        cells = " | ".join(f"{seconds:.1f}" for seconds in cpu)
        lines.append(f"| {name} | {link['megabytes_per_second']:.0f} | {cells} |")
    joins = ", ".join(
        f"{one['median']:.0f} s behind {nat} routers"
        for nat, one in joined.items()
        if nat != "preset"
    )
    punch = document["punch_seconds"]
    lines += [
        "",
        f"A hole is punched in {punch['median'] * 1000:.0f} ms "
        f"(slowest of {len(punch['all'])}: {max(punch['all']) * 1000:.0f} ms). From "
        f"`swarm-client join` to the first accepted receipt (preset `{joined['preset']}`, two "
        f"volunteers that join at once): {joins}.",
    ]
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
