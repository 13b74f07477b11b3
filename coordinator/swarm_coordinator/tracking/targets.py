"""What a run's records are written to: experiment trackers, each behind one small class.

A tracker's package is imported when its class is made, so that the command needs none but the
chosen one.
"""

from __future__ import annotations

import json
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, TypeVar

from swarm_coordinator.run_dir.folder import disk_errors
from swarm_coordinator.tracking.metrics_reader import Metrics, Rollback
from swarm_shared.base.errors import ConfigurationError

STANDARD_OUTPUT = Path("-")
PROJECT = "swarmtrain"
"""Name under which wandb and trackio group runs, unless an environment variable names another."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as a tracker knows it."""

    id: str
    """The same at every start, so that a tracker continues the run."""
    name: str
    output: Path
    """File of JSON lines, or the folder for what other trackers write on this machine."""


Taken = TypeVar("Taken", contravariant=True)


class Target(Protocol[Taken]):
    """Takes records in the order in which they became durable."""

    def put(self, record: Taken) -> None: ...

    def flush(self) -> None:
        """Return when a kill of this process loses no record."""

    def close(self) -> None: ...


class MetricsTarget(ABC):
    """A tracker of numbers by step, which by default stores and sends them by itself."""

    def put(self, record: Metrics | Rollback) -> None:
        if isinstance(record, Rollback):
            self.roll_back(record)
        else:
            self.write(record)

    @abstractmethod
    def write(self, metrics: Metrics) -> None: ...

    @abstractmethod
    def roll_back(self, rollback: Rollback) -> None: ...

    def flush(self) -> None:  # noqa: B027
        """Return when a kill of this process loses no record."""

    @abstractmethod
    def close(self) -> None: ...


@contextmanager
def needs(target: str, *packages: str) -> Iterator[None]:
    """Explain a package that is not installed, in one sentence; `packages` are what is to be
    installed, where it is not named like the target."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"--to {target} needs packages that are not installed ({error.name}); `pip install "
            f"{' '.join(packages) or target}` installs them, `pip install 'swarmtrain[log]'` those "
            "of all targets"
        ) from error


class JsonLines(MetricsTarget):
    """One JSON object a line, to a file or to standard output."""

    def __init__(self, run: TrackedRun) -> None:
        self._file: IO[str] = sys.stdout
        if run.output != STANDARD_OUTPUT:
            with disk_errors(run.output):
                self._file = run.output.open("a", encoding="utf-8")

    def write(self, metrics: Metrics) -> None:
        values = {
            name: value if math.isfinite(value) else None for name, value in metrics.values.items()
        }
        self._line({"step": metrics.step, "time": metrics.written_at, **values})

    def roll_back(self, rollback: Rollback) -> None:
        self._line(
            {
                "rollback_to": rollback.version,
                "time": rollback.written_at,
                "reason": rollback.reason,
            }
        )

    def _line(self, content: dict[str, object]) -> None:
        self._file.write(json.dumps(content) + "\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        if self._file is not sys.stdout:
            self._file.close()


class TensorBoard(MetricsTarget):
    """An event file in the folder; each start makes another one, as TensorBoard expects."""

    def __init__(self, run: TrackedRun) -> None:
        # The package's own writer: `tensorboardX` and `torch.utils` would import torch.
        with needs("tensorboard"):
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        self._event, self._session, self._summary = Event, SessionLog, Summary
        self._writer = EventFileWriter(str(run.output))

    def write(self, metrics: Metrics) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in metrics.values.items()
        ]
        self._writer.add_event(
            self._event(
                step=metrics.step,
                wall_time=metrics.written_at,
                summary=self._summary(value=values),
            )
        )

    def roll_back(self, rollback: Rollback) -> None:
        # A session that starts at a step makes TensorBoard discard that step and later ones.
        self._writer.add_event(
            self._event(
                step=rollback.version + 1,
                wall_time=rollback.written_at,
                session_log=self._session(status=self._session.START),
            )
        )

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(MetricsTarget):
    """A run of wandb; its environment variables choose project, entity and offline mode.

    Without what wandb adds of this machine: its name, command line, paths and git remote. Projects
    may be public, and the machine trains nothing.
    """

    def __init__(self, run: TrackedRun) -> None:
        with needs("wandb"):
            import wandb
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=run.name,
                id=run.id,
                resume="allow",
                dir=str(run.output),
                settings=wandb.Settings(
                    console="off",
                    disable_code=True,
                    disable_git=True,
                    x_disable_machine_info=True,
                    x_disable_meta=True,
                    x_disable_stats=True,
                    x_save_requirements=False,
                ),
            )
        except wandb.Error as error:
            raise ConfigurationError(f"wandb does not start this run: {error}") from error
        # wandb's own step only grows, and a run's may go back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, metrics: Metrics) -> None:
        self._run.log({"step": metrics.step, **metrics.values})

    def roll_back(self, rollback: Rollback) -> None:
        """wandb keeps what it has; the curve goes back to the step that is computed again."""

    def close(self) -> None:
        self._run.finish()


class Trackio(MetricsTarget):
    """A run in trackio's database, in the folder unless TRACKIO_DIR names another."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.output))  # read when it is imported
        with needs("trackio"):
            import trackio
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{run.name}-{run.id}",
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, metrics: Metrics) -> None:
        self._run.log(dict(metrics.values), step=metrics.step)

    def roll_back(self, rollback: Rollback) -> None:
        """trackio keeps what it has, and shows both values of a step that is computed again."""

    def close(self) -> None:
        self._run.finish()
