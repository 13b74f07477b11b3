"""Where a run's database is, and the interface of a connection to it.

Owns nothing of either database. Parameters are written `?`. Statements use only
what both databases share: `RETURNING` instead of a cursor's last row, `CASE` instead of `iif`, and
in an upsert the old row's columns qualified with the table's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote


@dataclass(frozen=True, slots=True)
class PostgresqlLocation:
    """A database on a server; each run has its own."""

    url: str = field(repr=False)
    lease_seconds: float = 5.0

    def __str__(self) -> str:
        """Return the address without its password and its parameters, of which some are secrets,
        for messages and logs."""
        without_password = re.sub(r"(//[^/@:]*):.*@", r"\1:…@", self.url)
        return re.sub(r"\?.*", "?…", without_password)

    @property
    def public_url(self) -> str:
        """The address without secrets: the driver then takes the password from ~/.pgpass."""
        address, mark, parameters = re.sub(r"(//[^/@:]*):[^/]*@", r"\1@", self.url).partition("?")
        kept = [part for part in parameters.split("&") if not _names_a_secret(part)]
        return address + mark + "&".join(kept) if kept else address


def _names_a_secret(parameter: str) -> bool:
    name = unquote(parameter.partition("=")[0])
    return "password" in name or "secret" in name


DatabaseLocation = Path | PostgresqlLocation
"""A file in the run folder, or a server named in run.toml."""


class Connection(Protocol):
    """An open database; `storage.sqlite` and `storage.postgresql` each provide one."""

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Any:
        """Execute a statement; return the database's own cursor with its rows."""

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> object: ...
