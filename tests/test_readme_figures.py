"""Each figure that README.md quotes depends on its result file.

`tests/test_benchmark_pages.py` compares the table itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import headline

ROOT = Path(__file__).parents[1]


def results() -> list[dict[str, Any]]:
    folder = ROOT / "benchmarks" / "results"
    return [json.loads((folder / f"{source}.json").read_text()) for source in headline.SOURCES]


def test_there_are_five_figures() -> None:
    assert headline.headline_markdown(*results()).count("\n") == 1 + 5


@pytest.mark.parametrize("source", headline.SOURCES)
def test_another_result_makes_another_table(source: str) -> None:
    """Each row depends on its file: a changed measurement cannot leave the README as it is."""
    documents = results()
    changed = dict(zip(headline.SOURCES, documents, strict=True))[source]
    match source:
        case "agreement":
            changed["codecs"]["exact-int8"]["farthest"] = 1e-9
        case "faults":
            changed["single_faults"]["freeze"][0]["recovery_seconds"] = 99.0
        case "throughput-small":
            changed["ratios"]["swarm-4x1 / torch"] = 0.5
        case "wan":
            changed["mixes"]["mobile"]["contenders"]["swarm-int8"]["tokens_per_second_median"] *= 2
        case "coordinator":
            changed["memory"]["of_each_kind"]["LeaseResolved"]["p99_ms"] = 999.0
    assert headline.headline_markdown(*documents) != headline.headline_markdown(*results())
