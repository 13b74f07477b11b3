"""Regenerates the tables of README.md and docs/ from the result files of the benchmarks.

    python -m benchmarks.pages            list stale tables; exit code 1 if there are any
    python -m benchmarks.pages --write    rewrite them

A generated table stands between `<!-- NAME -->` and `<!-- /NAME -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.codecs.__main__ import averages_markdown, codecs_markdown
from benchmarks.copies.__main__ import copies_markdown
from benchmarks.loss.agreement import agreement_markdown
from benchmarks.loss.bottlenecks import bottlenecks_markdown
from benchmarks.loss.lateness import lateness_markdown
from benchmarks.loss.local_steps.page import local_steps_markdown
from benchmarks.loss.quality import quality_markdown
from benchmarks.outcome import RESULTS
from benchmarks.pages import headline, tables
from benchmarks.pages.summary import summary_markdown
from benchmarks.simulator.rebalancing import rebalancing_markdown
from benchmarks.simulator.routing.__main__ import routing_markdown
from benchmarks.stage.gpu import gpu_markdown
from benchmarks.stage.memory import least_markdown, memory_markdown
from benchmarks.throughput.processor_seconds import processor_markdown
from benchmarks.trust.detection import detection_markdown
from benchmarks.trust.honest.page import honest_markdown
from benchmarks.trust.overhead_page import overhead_markdown
from benchmarks.trust.strangers_page import strangers_markdown
from benchmarks.wan.all_reduce.averaging import all_reduce_markdown
from benchmarks.wan.page import ratios_markdown, wan_markdown
from benchmarks.wan.timeline.page import timeline_markdown
from benchmarks.wire_bytes.page import wire_bytes_markdown

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class GeneratedTable:
    """One marked block of a page, and how it is made from result files."""

    page: str
    name: str
    sources: tuple[str, ...]
    """Stems of the result files; `make` takes one document for each."""
    make: Callable[..., str]

    def generate(self) -> str:
        return self.make(*(read_result(source) for source in self.sources))

    def current(self) -> str:
        return str(self._match()[1])

    def write(self) -> None:
        begin, end = self._match().span(1)
        page = ROOT / self.page
        text = page.read_text()
        page.write_text(text[:begin] + self.generate() + text[end:])

    def _match(self) -> re.Match[str]:
        pattern = f"<!-- {re.escape(self.name)} -->\n(.*?)\n<!-- /{re.escape(self.name)} -->"
        found = list(re.finditer(pattern, (ROOT / self.page).read_text(), re.DOTALL))
        if len(found) != 1:
            raise click.ClickException(f"{self.page} has {len(found)} blocks named {self.name!r}")
        return found[0]


def read_result(name: str) -> Mapping[str, Any]:
    document: Mapping[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document


SUMMARY_SOURCES = (
    "throughput-small", "wan", "all-reduce", "faults", "coordinator", "rebalancing", "prediction",
    "agreement", "quality", "wire-bytes", "copies", "yielding",
)  # fmt: skip

GENERATED = (
    GeneratedTable("README.md", headline.MARK, headline.SOURCES, headline.headline_markdown),
    GeneratedTable(
        "docs/benchmarks.md", "figures", ("throughput-small",), tables.throughput_markdown
    ),
    GeneratedTable(
        "docs/benchmarks.md", "processor figures", ("processor-seconds",), processor_markdown
    ),
    GeneratedTable("docs/benchmarks.md", "net figures", ("net",), tables.net_markdown),
    GeneratedTable("docs/benchmarks.md", "wan ratios", ("wan",), ratios_markdown),
    GeneratedTable("docs/benchmarks.md", "fault figures", ("faults",), tables.faults_markdown),
    GeneratedTable(
        "docs/benchmarks.md", "coordinator figures", ("coordinator",), tables.coordinator_markdown
    ),
    GeneratedTable("docs/benchmarks.md", "summary", SUMMARY_SOURCES, summary_markdown),
    GeneratedTable("docs/benchmarks.md", "wan figures", ("wan",), wan_markdown),
    GeneratedTable("docs/benchmarks.md", "timeline figures", ("wan-timeline",), timeline_markdown),
    GeneratedTable(
        "docs/benchmarks.md", "all-reduce figures", ("all-reduce",), all_reduce_markdown
    ),
    GeneratedTable("docs/benchmarks.md", "lateness figures", ("lateness",), lateness_markdown),
    GeneratedTable("docs/benchmarks.md", "codec figures", ("codecs",), codecs_markdown),
    GeneratedTable(
        "docs/benchmarks.md", "quality figures", ("quality", "codecs"), quality_markdown
    ),
    GeneratedTable(
        "docs/benchmarks.md", "bottleneck figures", ("bottlenecks",), bottlenecks_markdown
    ),
    GeneratedTable("docs/benchmarks.md", "average figures", ("codecs",), averages_markdown),
    GeneratedTable("docs/benchmarks.md", "agreement figures", ("agreement",), agreement_markdown),
    GeneratedTable("docs/benchmarks.md", "wire figures", ("wire-bytes",), wire_bytes_markdown),
    GeneratedTable("docs/benchmarks.md", "gpu figures", ("gpu",), gpu_markdown),
    GeneratedTable("docs/benchmarks.md", "memory figures", ("stage-memory",), memory_markdown),
    GeneratedTable("docs/benchmarks.md", "least figures", ("stage-memory-least",), least_markdown),
    GeneratedTable(
        "docs/local-steps.md", "local step figures", ("local-steps",), local_steps_markdown
    ),
    GeneratedTable("docs/simulator.md", "routing figures", ("routing",), routing_markdown),
    GeneratedTable(
        "docs/simulator.md", "rebalancing figures", ("rebalancing",), rebalancing_markdown
    ),
    GeneratedTable(
        "docs/simulator.md", "prediction figures", ("prediction",), tables.prediction_markdown
    ),
    GeneratedTable("docs/simulator.md", "growth figures", ("simulator",), tables.growth_markdown),
    GeneratedTable("docs/benchmarks.md", "trust figures", ("trust-overhead",), overhead_markdown),
    GeneratedTable(
        "docs/simulator.md", "detection figures", ("trust-detection",), detection_markdown
    ),
    GeneratedTable("docs/trust.md", "honest figures", ("trust-honest",), honest_markdown),
    GeneratedTable("docs/trust.md", "strangers figures", ("strangers",), strangers_markdown),
    GeneratedTable("docs/tensor-path.md", "copies figures", ("copies",), copies_markdown),
    GeneratedTable("docs/top.md", "view figures", ("views",), tables.views_markdown),
    GeneratedTable(
        "docs/preferences.md", "yielding figures", ("yielding",), tables.yielding_markdown
    ),
)


@click.command()
@click.option("--write", is_flag=True, help="Rewrite stale tables.")
def main(write: bool) -> None:
    """Compare the generated tables of all pages with the result files."""
    stale = [table for table in GENERATED if table.current() != table.generate()]
    for table in stale:
        if write:
            table.write()
        click.echo(f"{table.page}: {table.name} {'rewritten' if write else 'is stale'}")
    if stale and not write:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
