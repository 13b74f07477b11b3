"""The one way in which rows are asked for: SQL that SQLite and PostgreSQL both understand.

Owns the shape of a connection, and nothing of either database. Parameters are written `?`. What
the two do not share is left out: `RETURNING` instead of a cursor's last row, `CASE` instead of
`iif`, and in an upsert the old row's columns with the table's name before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol


class Rows(Protocol):
    """What a statement found."""

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """An open database. Both doors (`database`, `postgresql`) offer one."""

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Rows: ...

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> object: ...
