"""The process that evaluates checkpoints while the coordinator runs.

Started by `server.processes.evaluator` with a pipe as standard input, which closes when the
coordinator ends. Prints each result as a line of JSON (`Evaluation`). Only which checkpoint is due
is decided here.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from swarm_coordinator.durability.run_files import load_manifest, load_settings, read_database
from swarm_coordinator.evaluation.checkpoint_evaluation import heldout_loss, written_text
from swarm_coordinator.run_dir.checkpoint_files import CheckpointFolder
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.status.document import Evaluation
from swarm_coordinator.storage.records import read_newest_evaluation
from swarm_shared.base.errors import StorageError, SwarmError
from swarm_shared.base.types import Version
from swarm_shared.data.leaf_files import ShardSamples
from swarm_shared.data.tokenizer import load_tokenizer

NICE = 19
"""Niceness of the process: training and the coordinator come first."""
LOOK_SECONDS = 2.0
"""Seconds between two looks for a new checkpoint."""


def due(versions: Sequence[int], evaluated: int, every_steps: int, end: int) -> int | None:
    """Return the checkpoint that is to be evaluated now, of those that are there; None for none.

    It is the newest one, if it is `every_steps` after the one `evaluated` last (0: none yet), or
    the run's `end`.
    After a roll-back, checkpoints older than the last evaluated one are the run's history again.
    """
    newest = max(versions, default=0)
    last = min(evaluated, newest)
    return newest if newest - last >= every_steps or newest == end > last else None


class Evaluator:
    """Evaluates the checkpoints of one run. ConfigurationError, StorageError and ProtocolError for
    a run folder that cannot be read."""

    def __init__(self, folder: RunFolder) -> None:
        self._settings = load_settings(folder).evaluation
        self._manifest = load_manifest(folder)
        self._checkpoints = CheckpointFolder.of_run(folder, self._manifest)
        data = self._manifest.data
        self._tokenizer = load_tokenizer(data.tokenizer, folder.tokenizer)
        self._samples = ShardSamples(folder.data, self._manifest)
        newest = read_database(folder, read_newest_evaluation)
        self._evaluated: int = 0 if newest is None else newest.version

    def next(self) -> Evaluation | None:
        """Evaluate the checkpoint that is due; None if there is none, or if it was deleted during
        its evaluation."""
        end = self._manifest.training.steps
        version = due(
            self._checkpoints.versions(), self._evaluated, self._settings.every_steps, end
        )
        if version is None:
            return None
        self._evaluated = version
        files = self._checkpoints.stage_files(version)
        try:
            record = self._checkpoints.read(version)
            loss = heldout_loss(self._manifest, files, self._samples.of_evaluation())
            text = written_text(
                self._manifest, files, self._tokenizer, self._settings.prompt,
                self._settings.sample_tokens, self._manifest.training.seed,
            )  # fmt: skip
            if self._checkpoints.read(version) != record:
                return None
        except StorageError:
            if version in self._checkpoints.versions():
                raise
            return None
        return Evaluation(
            version=Version(version), heldout_loss=loss.nats, tokens=loss.tokens, sample=text
        )


def main(arguments: Sequence[str]) -> int:
    """Run the process until its standard input ends. The argument is RUN_DIR."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    torch.set_num_threads(1)
    try:
        evaluator = Evaluator(RunFolder(Path(arguments[0])))
        while not select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
            found = evaluator.next()
            if found is not None:
                print(found.model_dump_json(), flush=True)
    except SwarmError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0
