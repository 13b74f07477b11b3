"""Where a run's database is: a file in the run folder, or a PostgreSQL server named in run.toml."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PostgresqlLocation:
    """A database on a server; each run has its own."""

    url: str
    lease_seconds: float = 5.0

    def __str__(self) -> str:
        """Return the address without its password, for messages and logs."""
        return re.sub(r"(//[^/@:]*):[^@]*@", r"\1:…@", self.url)


DatabaseLocation = Path | PostgresqlLocation
