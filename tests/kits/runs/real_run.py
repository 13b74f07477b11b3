"""A real run of processes on this machine, and its reference: one process that trains the same."""

from __future__ import annotations

import fcntl
import hashlib
import signal
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from swarm_coordinator.demo.local_swarm import LocalSwarm
from swarm_coordinator.demo.subprocesses import Subprocess, Subprocesses, last_lines, wait_until
from swarm_coordinator.offline.merged_stages import merge_stages
from swarm_coordinator.offline.reference import StepRecord, evaluate, train_reference
from swarm_coordinator.run_creation.initialise import initialise_run
from swarm_coordinator.run_dir.checkpoint_files import CheckpointFolder
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.run_dir.initial_states import initial_files
from swarm_coordinator.storage.connection import DatabaseLocation
from swarm_coordinator.storage.database import database_exists
from swarm_coordinator.storage.history import History, history
from swarm_shared.base.errors import SwarmError
from swarm_shared.data.leaf_files import ShardSamples
from swarm_shared.identity.signed_manifest import run_id_of
from swarm_shared.model.llama import Stage
from swarm_shared.run.manifest import CodecsConfig, Manifest

MODULES = ("argparse.py", "difflib.py", "inspect.py", "pickle.py", "typing.py", "datetime.py")
"""Half a megabyte of the standard library's own text."""

SETTINGS: dict[str, object] = {
    # A tensor that a test corrupts has to stay decodable.
    "codecs.activation": "none",
    "codecs.gradient": "none",
    "model.hidden_size": 96,
    "model.intermediate_size": 256,
    "model.layers": 6,
    "model.heads": 4,
    "model.key_value_heads": 2,
    "model.sequence_length": 128,
    "training.microbatches_per_step": 12,
    "training.sequences_per_microbatch": 4,
    "training.evaluation_microbatches": 2,
    "run.seed": 11,
    # At 2e-3 from a cold start two orders of summation in one process end 2e-3 apart
    # (docs/decisions/0002-adam-epsilon.md).
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_steps": 5,
    "limits.starting_peers_per_stage": 2,
    "network.listen_host": "127.0.0.1",
}

PATIENCE_SECONDS = 240.0
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Trained:
    """Losses and final parameters of a training in one process."""

    losses: tuple[float, ...]
    heldout_loss: float | None
    """Of a training to its last step."""
    parameters: dict[str, torch.Tensor]


@dataclass
class Run:
    """A run folder, its processes and its reference."""

    manifest: Manifest
    folder: RunFolder
    swarm: LocalSwarm
    database: DatabaseLocation
    """In the folder, unless the run keeps it on a server."""

    def history(self) -> History | None:
        """Read the run's history; None while there is no database yet."""
        return history(self.database) if database_exists(self.database) else None

    def version(self) -> int:
        seen = self.history()
        return seen.restored.version if seen is not None else 0

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        wait_until(ready, self.swarm.children, PATIENCE_SECONDS, what)

    def wait_for_version(self, version: int) -> None:
        self.wait_for(lambda: self.version() >= version, f"step {version}")

    def kill(self, process: Subprocess) -> None:
        """Kill it at once, as a power cut would; its exit is no failure of the run."""
        self.swarm.expect_exit(process)
        process.signal(signal.SIGKILL)

    def restart_coordinator(self, invite: str) -> tuple[float, ...]:
        """Kill the coordinator and start it again; return the losses that it had stored."""
        killed = self.swarm.coordinator
        assert killed is not None
        self.kill(killed)
        killed.wait(30.0)
        stored = self.losses()
        assert self.swarm.start_coordinator() == invite
        return stored

    def stop(self) -> int:
        """Stop the run with a checkpoint of the version it has reached; return that version."""
        coordinator = self.swarm.coordinator
        assert coordinator is not None
        for child in self.swarm.children.started:
            self.swarm.expect_exit(child)
        coordinator.signal(signal.SIGINT)
        coordinator.wait(STOP_SECONDS)
        ending = coordinator.describe_exit()
        self.swarm.children.end()
        if coordinator.exit_code() != 0:
            raise SwarmError(f"the coordinator {ending} when it was stopped")
        return self.version()

    def history_at_its_end(self) -> History:
        """Wait until every process has exited: bytes of links are written last."""
        assert self.swarm.wait_for_exit() == []
        seen = self.history()
        assert seen is not None
        return seen

    def losses(self) -> tuple[float, ...]:
        seen = self.history()
        assert seen is not None
        return tuple(step.loss for step in seen.steps)

    def reference_losses(self, steps: int | None = None) -> tuple[float, ...]:
        """Return all of them, or those of the first `steps` of the same schedule."""
        return reference(self.manifest.model_dump_json(), str(self.folder.data), steps).losses

    def parameters(self, version: int) -> dict[str, torch.Tensor]:
        """Return the parameters in the checkpoint of that version."""
        checkpoints = CheckpointFolder(
            self.folder.checkpoints, run_id_of(self.manifest), self.manifest.stage_count, 3
        )
        files = checkpoints.stage_files(version)
        return merge_stages(self.manifest.model, files)

    def assert_equals_reference(self, steps: int | None = None) -> None:
        """Every loss, the held-out one and every parameter equal the reference's, bit for bit.

        `steps`: of a run that was stopped after them.
        """
        assert self.manifest.codecs.average == "exact"
        steps = steps or self.manifest.training.steps
        expected = reference(self.manifest.model_dump_json(), str(self.folder.data), steps)
        assert list(self.losses()) == list(expected.losses)
        seen = self.history()
        assert seen is not None
        assert seen.heldout_loss == expected.heldout_loss
        final = self.parameters(steps)
        assert final.keys() == expected.parameters.keys()
        unequal = [
            name for name, t in expected.parameters.items() if not torch.equal(final[name], t)
        ]
        assert unequal == []

    def assert_near_reference(self, tolerance: float) -> None:
        """Losses, and parameters in norm, are within a relative tolerance of the reference's.

        In norm and not element by element: Adam divides by the root of the second moment, so an
        element whose gradients are tiny turns a rounding difference into a step of full size.
        """
        steps = self.manifest.training.steps
        assert self.losses() == pytest.approx(self.reference_losses(steps), rel=tolerance)
        assert self.parameter_distance(steps) <= tolerance

    def describe(self) -> str:
        """Return the state and the last log lines of its processes, for the report of a failure."""
        status = self.swarm.status()
        shown = ("phase", "waiting_for", "version", "generation", "cells_done", "cells_total")
        lines = [", ".join(f"{name} {status.get(name)!r}" for name in shown)]
        lines += [f"stage {row['stage']}: {row['peers']} peers" for row in status.get("stages", ())]
        for child in self.swarm.children.started:
            lines.append(f"{child.name} {child.describe_exit()}")
        for log in sorted({child.log for child in self.swarm.children.started}):
            lines += [f"-- {log.stem}", *(line[:160] for line in last_lines(log, 6))]
        return "\n".join(lines)

    def parameter_distance(self, steps: int) -> float:
        """Return the relative distance in norm of this run's parameters from the reference's."""
        expected = reference(self.manifest.model_dump_json(), str(self.folder.data), steps)
        final = self.parameters(steps)
        assert final.keys() == expected.parameters.keys()
        difference = sum(
            float((final[name] - tensor).double().square().sum())
            for name, tensor in expected.parameters.items()
        )
        norm = sum(float(t.double().square().sum()) for t in expected.parameters.values())
        return float((difference / norm) ** 0.5)


_cache: dict[str, Trained] = {}
_shared_folder: Path | None = None


@contextmanager
def references_shared_in(folder: Path) -> Iterator[None]:
    """Keep references in files of this folder, so that each is trained by one process only."""
    global _shared_folder
    folder.mkdir(exist_ok=True)
    _shared_folder = folder
    yield
    _shared_folder = None


def reference(manifest_json: str, data_folder: str, steps: int | None = None) -> Trained:
    """Train the same run in this process, or return what another run with this key has trained.

    Without codecs and with plain sums the stages are no part of the key.
    """
    manifest = Manifest.model_validate_json(manifest_json)
    steps = steps or manifest.training.steps
    cuts = manifest.stages if manifest.codecs != CodecsConfig() else ()
    key = repr(
        (
            manifest.model, manifest.training, manifest.optimizer, manifest.data, steps,
            manifest.codecs, cuts, manifest.initial,
        )
    )  # fmt: skip
    if key not in _cache:
        with _shared_file(key) as file:
            if file is not None and file.exists():
                _cache[key] = Trained(*torch.load(file))
            else:
                trained = _cache[key] = _train(manifest, Path(data_folder), steps)
                if file is not None:
                    torch.save((trained.losses, trained.heldout_loss, trained.parameters), file)
    return _cache[key]


@contextmanager
def _shared_file(key: str) -> Iterator[Path | None]:
    """Lock the file of this key: a second process waits until the first one has trained."""
    if _shared_folder is None:
        yield None
        return
    path = _shared_folder / hashlib.sha256(key.encode()).hexdigest()
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path


def _train(manifest: Manifest, data_folder: Path, steps: int) -> Trained:
    samples = ShardSamples(data_folder, manifest)
    records: list[StepRecord] = []
    stage = train_reference(
        manifest,
        samples.of_step,
        steps,
        records.append,
        threads=1,
        initial=initial_files(RunFolder(data_folder.parent), manifest),
    )
    parameters = {name: p.detach().clone() for name, p in stage.all_parameters()}
    return Trained(
        tuple(record.loss for record in records),
        _heldout_loss(manifest, data_folder, stage) if steps == manifest.training.steps else None,
        parameters,
    )


def _heldout_loss(manifest: Manifest, data_folder: Path, stage: Stage) -> float | None:
    count = manifest.training.evaluation_microbatches
    if not count:
        return None
    return evaluate(stage, ShardSamples(data_folder, manifest).of_evaluation())


def corpus_sources() -> tuple[Path, ...]:
    library = Path(sysconfig.get_paths()["stdlib"])
    return tuple(library / name for name in MODULES)


@contextmanager
def runs(folder: Path) -> Iterator[Callable[..., Run]]:
    """Make run folders (their paths have a space); end every process of them afterwards."""
    corpus = folder / "a corpus"
    corpus.mkdir()
    for source in corpus_sources():
        (corpus / source.name).write_bytes(source.read_bytes())

    with Subprocesses() as children:

        def make(
            stages: int, steps: int, given_model: Path | None = None, **overrides: object
        ) -> Run:
            run_folder = folder / "a run"
            sizes = {n: v for n, v in SETTINGS.items() if n.startswith("model.")}
            settings = {
                **SETTINGS,
                "training.steps": steps,
                **{name.replace("__", "."): value for name, value in overrides.items()},
            }
            if given_model is not None:
                settings = {n: v for n, v in settings.items() if n not in sizes}
            manifest = initialise_run(
                run_folder, "tiny", str(corpus), stages, settings, given_model=given_model
            )
            made = RunFolder(run_folder)
            return Run(manifest, made, LocalSwarm(run_folder, children), made.database)

        yield make
