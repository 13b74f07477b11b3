"""Every table on a page of figures is generated from a result file, or is listed with a reason."""

from __future__ import annotations

import dataclasses
import re

import pytest

from benchmarks.outcome import RESULTS
from benchmarks.pages.__main__ import GENERATED, ROOT, GeneratedTable
from swarm_coordinator.simulator.churn_models import churn_model

PAGES = sorted({table.page for table in GENERATED})
FIGURE_PAGES = (
    "docs/benchmarks.md", "docs/local-steps.md", "docs/simulator.md", "docs/tensor-path.md"
)  # fmt: skip
NOT_GENERATED: dict[str, dict[str, str]] = {
    "docs/benchmarks.md": {
        "| contender | program |": "a description without figures",
        "| one process, one thread | training tokens | CPU seconds | first 8,192 bytes "
        "| first 131,072 bytes |": "single measurements by hand, as the page says",
    },
    "docs/local-steps.md": {},
    "docs/simulator.md": {
        "| part | contents |": "a description without figures",
        "| model | machines | parameters and defaults |": "defaults, compared with the code below",
    },
    "docs/tensor-path.md": {
        "| hop | process, thread | operation | copies |":
            "copies per hop, read off the code; tests/measurement/test_copies.py counts their sums",
    },
}  # fmt: skip
"""Heads of tables without a result file, by page, each with the reason."""


@pytest.mark.parametrize("table", GENERATED, ids=lambda table: f"{table.page}: {table.name}")
def test_a_table_is_what_its_result_files_give(table: GeneratedTable) -> None:
    assert table.current() == table.generate(), "run python -m benchmarks.pages --write"


@pytest.mark.parametrize("page", PAGES)
def test_every_marked_block_has_a_generator(page: str) -> None:
    marked = re.findall(r"^<!-- /([\w -]+) -->$", (ROOT / page).read_text(), re.MULTILINE)
    assert sorted(marked) == sorted(table.name for table in GENERATED if table.page == page)


@pytest.mark.parametrize("page", FIGURE_PAGES)
def test_a_table_without_a_result_file_is_listed(page: str) -> None:
    text = (ROOT / page).read_text()
    for table in GENERATED:
        if table.page == page:
            text = text.replace(table.current(), "")
    heads = re.findall(r"^(\|.*\|)\n\|[-:|]+\|$", text, re.MULTILINE)
    assert heads == list(NOT_GENERATED[page])


def test_every_result_file_has_a_table() -> None:
    used = {source for table in GENERATED for source in table.sources}
    assert {path.stem for path in RESULTS.glob("*.json")} == used


@pytest.mark.parametrize("name", ["steady", "home", "spot"])
def test_the_page_has_the_defaults_of_the_churn_models(name: str) -> None:
    model = churn_model(name)
    assert dataclasses.is_dataclass(model)
    defaults = ", ".join(f"`{field.name}={field.default:g}`" for field in dataclasses.fields(model))
    rows = (ROOT / "docs/simulator.md").read_text().splitlines()
    (row,) = (row for row in rows if row.startswith(f"| `{name}` |"))
    assert row.endswith(f"| {defaults} |" if defaults else "| |")
