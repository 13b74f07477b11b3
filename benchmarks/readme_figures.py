"""Puts a measured throughput table into README.md, between its two marks.

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
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"


@click.command()
@click.argument("result", type=click.Path(path_type=Path, exists=True))
def main(result: Path) -> None:
    """Rewrite the figures of README.md from RESULT, a file that `make bench` wrote."""
    text = README.read_text()
    block = f"{BEGIN}\n{figures_markdown(json.loads(result.read_text()))}\n{END}"
    changed, count = re.subn(f"{BEGIN}.*{END}", lambda _: block, text, flags=re.DOTALL)
    if count != 1:
        raise click.ClickException(f"{README} has no marks {BEGIN} and {END}")
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


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
