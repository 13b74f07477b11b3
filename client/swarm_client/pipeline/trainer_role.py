"""The volunteer as a trainer: its data, its way to stage 0, and the leases it works through."""

from __future__ import annotations

from pathlib import Path

import trio

from swarm_client.pipeline.downstream import Downstream
from swarm_client.pipeline.samples import RunSamples
from swarm_client.pipeline.trainer import CurrentStep, Report, Trainer
from swarm_shared.protocol import Lease
from swarm_shared.run.manifest import Manifest


class TrainerRole:
    """Nothing until `begin`: a volunteer that has no data yet takes no lease."""

    def __init__(self, report: Report, current_step: CurrentStep, nursery: trio.Nursery) -> None:
        self._report = report
        self._current_step = current_step
        self._nursery = nursery
        self._trainer: Trainer | None = None
        self._first_stage: Downstream | None = None
        self._refusing: str | None = None
        self._leaving = False

    @property
    def begun(self) -> bool:
        return self._trainer is not None

    def begin(self, manifest: Manifest, data_folder: Path, first_stage: Downstream) -> None:
        self._first_stage = first_stage
        self._trainer = Trainer(
            RunSamples(manifest, data_folder),
            first_stage,
            self._report,
            self._current_step,
            self._nursery,
        )
        if self._refusing is not None:
            self._trainer.stop_taking(self._refusing)

    def take(self, lease: Lease) -> None:
        if self._trainer is not None:
            self._trainer.take(lease)

    def leave(self) -> None:
        self._leaving = True
        self._refuse("this volunteer is leaving")

    def pause(self) -> None:
        if not self._leaving:
            self._refuse("this volunteer is paused")

    def resume(self) -> None:
        """Take leases again, unless the volunteer is about to leave."""
        if not self._leaving:
            self._refusing = None
            if self._trainer is not None:
                self._trainer.take_again()

    def _refuse(self, reason: str) -> None:
        self._refusing = reason
        if self._trainer is not None:
            self._trainer.stop_taking(reason)

    def roster_changed(self) -> None:
        if self._first_stage is not None:
            self._first_stage.roster_changed()
