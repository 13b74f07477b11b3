"""The interface of a database connection, for SQL that SQLite and PostgreSQL both understand.

Owns the protocol, and nothing of either database. Parameters are written `?`. Statements use only
what both databases share: `RETURNING` instead of a cursor's last row, `CASE` instead of `iif`, and
in an upsert the old row's columns qualified with the table's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol


class Rows(Protocol):
    """The result of a statement."""

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """An open database; `storage.sqlite` and `storage.postgresql` each provide one."""

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Rows: ...

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> object: ...
