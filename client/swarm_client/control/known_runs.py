"""The runs that this home knows, which of them is worked on, and a pause that outlives a restart.

Owns `runs.json`. A run is entered when its coordinator has admitted this peer, never before. The
file holds invites, whose tokens are secrets: it is private. Values only; `read` and `write` are
the only ones that touch the disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from swarm_client.control.messages import JoinArguments, first_error
from swarm_client.control.status_document import KnownRun
from swarm_shared.base.atomic_file import PRIVATE_MODE, write_atomically
from swarm_shared.base.errors import StorageError, UsageError
from swarm_shared.base.frozen_model import FrozenModel

FORMAT = 1
MAX_BYTES = 2**20
MAX_RUNS = 100
"""The one that was joined longest ago is forgotten first."""


class StoredRun(FrozenModel):
    id: Annotated[str, Field(max_length=100)]
    name: Annotated[str, Field(max_length=200)]
    joined_at: float
    """Unix seconds."""
    join: JoinArguments


class StoredPause(FrozenModel):
    until: float | None = None


class StoredRuns(FrozenModel):
    format: int = FORMAT
    runs: tuple[StoredRun, ...] = ()
    chosen: str | None = None
    pause: StoredPause | None = None
    """The user's own. It is kept over a restart: the machine stays theirs."""

    def chosen_run(self) -> StoredRun | None:
        return next((run for run in self.runs if run.id == self.chosen), None)

    def find(self, wanted: str) -> StoredRun:
        """By ID, the beginning of one, or name. UsageError unless exactly one fits."""
        exact = [run for run in self.runs if wanted in (run.id, run.name)]
        found = exact or [run for run in self.runs if run.id.startswith(wanted)]
        if len(found) == 1:
            return found[0]
        known = ", ".join(f"{run.name} ({run.id[:12]})" for run in self.runs) or "none"
        what = f"{len(found)} known runs fit {wanted!r}" if found else f"no known run is {wanted!r}"
        raise UsageError(f"{what}; known: {known}; name one by the beginning of its ID")

    def joined(self, run_id: str, name: str, join: JoinArguments, now: float) -> StoredRuns:
        """The run was joined, perhaps again with other wishes; it is the one that is worked on."""
        before = next((run for run in self.runs if run.id == run_id), None)
        since = now if before is None else before.joined_at
        entry = StoredRun(id=run_id, name=name, joined_at=since, join=join)
        others = [run for run in self.runs if run.id != run_id]
        newest = sorted(others, key=lambda run: run.joined_at)[-(MAX_RUNS - 1) :]
        return self.model_copy(update={"runs": (*newest, entry), "chosen": run_id})

    def choosing(self, run_id: str | None) -> StoredRuns:
        return self.model_copy(update={"chosen": run_id})

    def without(self, run_id: str) -> StoredRuns:
        runs = tuple(run for run in self.runs if run.id != run_id)
        chosen = None if self.chosen == run_id else self.chosen
        return self.model_copy(update={"runs": runs, "chosen": chosen})

    def pausing(self, pause: StoredPause | None) -> StoredRuns:
        return self.model_copy(update={"pause": pause})

    def listed(self) -> tuple[KnownRun, ...]:
        """Without the invites."""
        return tuple(
            KnownRun(id=r.id, name=r.name, joined_at=r.joined_at, chosen=r.id == self.chosen)
            for r in self.runs
        )


def read(path: Path) -> StoredRuns:
    """An empty book where there is none. StorageError for one that cannot be understood: it holds
    invites, and is not thrown away by itself."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return StoredRuns()
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    try:
        if len(content) > MAX_BYTES:
            raise StorageError(f"{path} is too large for a list of runs; move it away")
        return StoredRuns.model_validate_json(content)
    except ValidationError as error:
        raise StorageError(
            f"{path} cannot be understood ({first_error(error)}); it is damaged or of a newer "
            "version: install that one again, or move the file away and join again"
        ) from error


def write(path: Path, book: StoredRuns) -> None:
    write_atomically(path, book.model_dump_json(indent=1).encode() + b"\n", PRIVATE_MODE)
