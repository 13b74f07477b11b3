"""The page of the data flows against the code: every file exists and defines what its row names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "data-flows.md"
ROW = re.compile(r"^\| \d+ \| [^|]+ \| \[[^]]+\]\(\.\./([^)]+)\) \| ([^|]+) \|", re.MULTILINE)

MOST_FILES_OF_A_MICROBATCH = 20
"""Files that one microbatch may pass through; as many as a reader keeps in mind."""


def flows() -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    """(file, names) of each row, by the heading of its table."""
    _, *sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    return {
        section.splitlines()[0]: [
            (file, tuple(re.findall(r"`([^`]+)`", names))) for file, names in ROW.findall(section)
        ]
        for section in sections
    }


def defined_in(file: Path) -> set[str]:
    """Functions and classes of a file, nested ones included."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)}


ROWS = [(title, file, names) for title, rows in flows().items() for file, names in rows]


@pytest.mark.parametrize(("title", "file", "names"), ROWS)
def test_each_file_of_a_flow_defines_what_its_row_names(
    title: str, file: str, names: tuple[str, ...]
) -> None:
    assert names, f"{title}: the row of {file} names no function"
    assert set(names) <= defined_in(ROOT / file)


def test_each_table_has_a_file_once_and_a_microbatch_passes_few_files() -> None:
    files = {title: [file for file, _ in rows] for title, rows in flows().items()}
    assert all(len(set(some)) == len(some) > 10 for some in files.values())
    microbatch = next(some for title, some in files.items() if title.startswith("A microbatch"))
    assert len(microbatch) <= MOST_FILES_OF_A_MICROBATCH
