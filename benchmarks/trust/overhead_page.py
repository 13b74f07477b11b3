"""The table of what verified work costs, in docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.pages.markdown import headed_table, when_and_where


def overhead_markdown(document: Mapping[str, Any]) -> str:
    """Throughput with audits over that without."""
    rows = [
        (
            f"{line}, `{found['preset']}`", row["name"],
            f"{median(row['audits_passed']):.0f} of {found['cells']}",
            f"{row['tokens_per_second_median']:,.0f}", f"{row['over_none']:.3f}",
            f"{min(row['tokens_per_second_all']):,.0f} to {max(row['tokens_per_second_all']):,.0f}",
        )
        for line, found in document["lines"].items()
        for row in found["rows"].values()
    ]  # fmt: skip
    head = (
        f"Medians of {document['repetitions']} interleaved repetitions of {document['steps']} "
        f"steps, {when_and_where(document)}, load average {document['load_average'][0]:.1f} "
        f"before. {document['stages']} stages x {document['peers_per_stage']} peers."
    )
    columns = ("line", "audited", "audits passed", "tokens/s", "over none", "range of tokens/s")
    return headed_table(head, columns, "llrrrr", rows)
