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

from swarm_coordinator.core.events import CheckpointRecord
from swarm_coordinator.durability.run_files import load_manifest, load_settings, read_database
from swarm_coordinator.evaluation.checkpoint_evaluation import heldout_loss, written_text
from swarm_coordinator.run_dir.checkpoint_files import CheckpointFolder
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.run_dir.initial_states import initial_files
from swarm_coordinator.status.document import Evaluation
from swarm_coordinator.storage.records import read_checkpoints, read_newest_evaluation
from swarm_shared.base.errors import StorageError, SwarmError
from swarm_shared.base.types import Version
from swarm_shared.data.leaf_files import ShardSamples
from swarm_shared.data.tokenizer import load_tokenizer

NICE = 19
"""Niceness of the process: training and the coordinator come first."""
LOOK_SECONDS = 2.0
"""Seconds between two looks for a new checkpoint."""


def due(newest: int, evaluated: int, every_steps: int, end: int) -> bool:
    """Return whether the newest checkpoint is to be evaluated: it has at least `every_steps` steps
    more than the last evaluated one (0: none yet), or is that of the run's end."""
    return newest - evaluated >= every_steps or newest == end > evaluated


class Evaluator:
    """Evaluates the checkpoints of one run.

    The database says which checkpoints and evaluations are of the run's history: after a roll-back
    the folder still has later ones. ConfigurationError, StorageError and ProtocolError for a run
    folder that cannot be read.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._settings = load_settings(folder).evaluation
        self._manifest = load_manifest(folder)
        self._checkpoints = CheckpointFolder.of_run(folder, self._manifest)
        data = self._manifest.data
        self._tokenizer = load_tokenizer(data.tokenizer, folder.tokenizer)
        self._samples = ShardSamples(folder.data, self._manifest)
        self._tried: CheckpointRecord | None = None
        """The checkpoint that was looked at last, so that each is evaluated once at most."""

    def next(self) -> Evaluation | None:
        """Evaluate the newest checkpoint if it is due; None if it is not, or if it was deleted or
        left by a roll-back during its evaluation."""
        newest = self._newest_checkpoint()
        if newest is None or newest == self._tried:
            return None
        self._tried = newest
        last = read_database(self._folder, read_newest_evaluation)
        end, evaluated = self._manifest.training.steps, 0 if last is None else last.version
        if not due(newest.version, evaluated, self._settings.every_steps, end):
            return None
        try:
            found = self._evaluate(newest.version)
        except StorageError:
            if newest.version in self._checkpoints.versions():
                raise
            return None
        return found if self._is_of_history(newest) else None

    def _newest_checkpoint(self) -> CheckpointRecord | None:
        known = read_database(self._folder, read_checkpoints)
        return next(iter(known.values()), None) if known else None

    def _is_of_history(self, checkpoint: CheckpointRecord) -> bool:
        known = read_database(self._folder, read_checkpoints) or {}
        return known.get(checkpoint.version) == checkpoint

    def _evaluate(self, version: Version) -> Evaluation:
        files = self._checkpoints.stage_files(version)
        initial = initial_files(self._folder, self._manifest)
        loss = heldout_loss(self._manifest, files, self._samples.of_evaluation(), initial)
        text = written_text(
            self._manifest, files, self._tokenizer, self._settings.prompt,
            self._settings.sample_tokens, self._manifest.training.seed, initial,
        )  # fmt: skip
        return Evaluation(version=version, heldout_loss=loss.nats, tokens=loss.tokens, sample=text)


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
