"""Follows a run as it grows and writes its records to a tracker, until the run ends.

Owns the file with the position, which lies beside the output and does not count without it.
It is written after the tracker has the records, so a kill of this process can repeat records of the
last batch, and loses none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from swarm_coordinator.run_dir.folder import read_bytes
from swarm_coordinator.tracking.journal_reader import Batch, Position, Record
from swarm_coordinator.tracking.targets import Target
from swarm_shared.base.atomic_file import write_atomically
from swarm_shared.base.errors import StorageError

READ_INTERVAL_SECONDS = 1.0


def load_position(path: Path) -> Position:
    """Read the position at which an earlier start stopped; the beginning where there is none."""
    if not path.exists():
        return Position()
    try:
        return Position.model_validate_json(read_bytes(path))
    except ValidationError as error:
        raise StorageError(
            f"{path} is not a position in a run; delete it, and the whole run is written again"
        ) from error


def follow(
    read: Callable[[Position], Batch[Record]],
    target: Target[Record],
    position_file: Path | None,
    stopped: Callable[[float], bool],
    *,
    once: bool = False,
) -> None:
    """Write every record to the target until the run has ended, or `stopped`; with `once`, until
    there is nothing newer.

    `stopped` waits for the given seconds at most and returns whether to end.
    """
    position = Position() if position_file is None else load_position(position_file)
    while True:
        batch = read(position)
        for record in batch.records:
            target.put(record)
        if batch.position != position:
            target.flush()
            position = batch.position
            if position_file is not None:
                write_atomically(position_file, position.model_dump_json().encode())
        at_end = batch.complete and (batch.finished or once)
        if at_end or stopped(READ_INTERVAL_SECONDS if batch.complete else 0.0):
            return
