"""The figures that README.md quotes are those of the result files in the repository."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import headline

ROOT = Path(__file__).parents[1]


def results() -> list[dict[str, Any]]:
    folder = ROOT / "benchmarks" / "results"
    return [json.loads((folder / f"{source}.json").read_text()) for source in headline.SOURCES]


def test_the_readme_quotes_what_the_result_files_say() -> None:
    begin, end = f"<!-- {headline.MARK} -->\n", f"\n<!-- /{headline.MARK} -->"
    blocks = re.findall(f"{begin}(.*?){end}", (ROOT / headline.PAGE).read_text(), re.DOTALL)
    assert blocks == [headline.current()]


def test_there_are_five_figures() -> None:
    assert headline.current().count("\n") == 1 + 5


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
    assert headline.headline_markdown(*documents) != headline.current()
