"""The schema names every table that it makes, in an order that a copy can follow."""

from __future__ import annotations

import re
from pathlib import Path

from swarm_coordinator.storage.schema import SCHEMA, TABLES, for_postgresql
from swarm_coordinator.storage.sqlite import open_for_writing


def test_every_table_is_listed(tmp_path: Path) -> None:
    connection = open_for_writing(tmp_path / "run.sqlite3")
    found = {row[0] for row in connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    )}  # fmt: skip
    connection.close()
    assert found == set(TABLES)


def test_a_table_is_listed_after_those_that_it_refers_to() -> None:
    for table, content in re.findall(r"CREATE TABLE (\w+) \((.*?)\n\) STRICT", SCHEMA, re.DOTALL):
        for parent in re.findall(r"REFERENCES (\w+)", content):
            assert TABLES.index(parent) < TABLES.index(table), (table, parent)


def test_nothing_of_sqlites_dialect_is_left_for_a_server() -> None:
    script = for_postgresql(SCHEMA)
    assert not re.search(r"STRICT|WITHOUT ROWID|\bINTEGER\b|\bREAL\b", script)
