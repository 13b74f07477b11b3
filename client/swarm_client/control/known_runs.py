"""The runs that this home has joined, which one is current, and the user's pause. Survives
restarts.

Owns `runs.json`. A run is added when its coordinator has admitted this peer, never before. The file
holds invites, whose tokens are secrets: it is private.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from swarm_client.control.messages import JoinArguments
from swarm_client.control.status_document import KnownRun
from swarm_client.control.stored_file import read_document, write_document
from swarm_shared.base.atomic_file import PRIVATE_MODE
from swarm_shared.base.errors import UsageError
from swarm_shared.base.frozen_model import FrozenModel

MAX_RUNS = 100
"""Maximum number of stored runs; the one joined longest ago is dropped first."""


class StoredRun(FrozenModel):
    id: Annotated[str, Field(max_length=100)]
    name: Annotated[str, Field(max_length=200)]
    joined_at: float
    """Unix seconds."""
    join: JoinArguments


class StoredPause(FrozenModel):
    until: float | None = None


class StoredRuns(FrozenModel):
    """The content of `runs.json`."""

    format: Literal[1] = 1
    runs: tuple[StoredRun, ...] = ()
    chosen: str | None = None
    pause: StoredPause | None = None
    """The user's own pause. It survives a restart: the machine stays the user's."""

    def chosen_run(self) -> StoredRun | None:
        return next((run for run in self.runs if run.id == self.chosen), None)

    def find(self, name_or_id: str) -> StoredRun:
        """The run with this ID, ID prefix or name. UsageError unless exactly one matches."""
        if not self.runs:
            raise UsageError("no run has been joined yet; `swarm-client join INVITE` joins one")
        exact = [run for run in self.runs if name_or_id in (run.id, run.name)]
        matches = exact or [run for run in self.runs if run.id.startswith(name_or_id)]
        if len(matches) == 1:
            return matches[0]
        known = ", ".join(f"{run.name} ({run.id[:12]})" for run in self.runs)
        what = (
            f"{len(matches)} known runs match {name_or_id!r}"
            if matches
            else f"no known run matches {name_or_id!r}"
        )
        raise UsageError(f"{what}; known: {known}; give the beginning of a run's ID")

    def joined(self, run_id: str, name: str, join: JoinArguments, now: float) -> StoredRuns:
        """Add a run, or replace its options if it was joined before; it becomes the current one."""
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
        """The runs without their invites."""
        return tuple(
            KnownRun(id=r.id, name=r.name, joined_at=r.joined_at, chosen=r.id == self.chosen)
            for r in self.runs
        )


def read(path: Path) -> StoredRuns:
    """The stored runs; empty if there is no file. StorageError for one that cannot be parsed: it
    holds invites, so it is never discarded automatically."""
    return read_document(path, StoredRuns(), "move the file away and join again")


def write(path: Path, book: StoredRuns) -> None:
    write_document(path, book, PRIVATE_MODE)
