"""The process that evaluates checkpoints: its results go into the store and the status.

Imports nothing that the evaluation is made of; torch stays out of the coordinator.
"""

from __future__ import annotations

import anyio.to_thread
from pydantic import ValidationError

from swarm_coordinator.core.events import EvaluationRecord
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.server.processes.supervisor import Report, Supervisor
from swarm_coordinator.status.document import MAX_SAMPLE_CHARACTERS, Evaluation
from swarm_coordinator.storage.records import read_newest_evaluation
from swarm_coordinator.storage.store import Store
from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.types import Version
from swarm_shared.host.python_modules import module_command

LONGEST_LINE_BYTES = 1000 + 6 * MAX_SAMPLE_CHARACTERS
"""JSON takes at most six bytes for a character."""


class EvaluatorProcess:
    """The process that evaluates checkpoints, and its newest result."""

    def __init__(self, folder: RunFolder, report: Report) -> None:
        self.folder = folder
        self.newest: Evaluation | None = None
        self.supervisor = Supervisor("the evaluation", folder.log, report)

    def shown(self, version: Version) -> Evaluation | None:
        """The newest evaluation, unless a run at `version` has gone back behind it."""
        newest = self.newest
        return newest if newest is not None and newest.version <= version else None

    async def run(self, store: Store) -> None:
        """Evaluate checkpoints until cancelled. Raises nothing: the run continues without it."""

        async def evaluate() -> None:
            before = await anyio.to_thread.run_sync(store.read, read_newest_evaluation)
            if before is not None:
                self.newest = Evaluation.model_validate(before, from_attributes=True)
            command = module_command("swarm_coordinator.evaluation", str(self.folder.path))
            await self.supervisor.keep_running(
                command,
                take_line=lambda line: self._take(store, line),
                longest_line=LONGEST_LINE_BYTES,
            )

        await self.supervisor.guard(evaluate)

    def _take(self, store: Store, line: bytes) -> None:
        try:
            evaluation = Evaluation.model_validate_json(line)
        except ValidationError as error:
            raise ProtocolError(f"a line that is no evaluation was printed: {error}") from error
        self.newest = evaluation
        loss = float("nan") if evaluation.heldout_loss is None else evaluation.heldout_loss
        store.post(
            EvaluationRecord(
                Version(evaluation.version), loss, evaluation.tokens, evaluation.sample
            )
        )
