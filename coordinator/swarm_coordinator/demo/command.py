"""`swarm-coordinator demo`: a whole run on this machine, and its comparison with one process.

Owns the order of the work and its output. Coordinator and volunteers are real processes, started as
organisers and volunteers start them (`demo.local_swarm`); one volunteer is killed in the middle
(`demo.churn`). The figures come from the run's database, their presentation from
`demo.run_summary` and `demo.progress_line`. At the end one process computes the same run, and every
loss has to be equal (`demo.reference_check`).
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from swarm_coordinator.demo.churn import FEWEST_STEPS, Churn, Kill, kill_step
from swarm_coordinator.demo.local_swarm import LocalSwarm
from swarm_coordinator.demo.progress_line import Progress, ProgressDisplay
from swarm_coordinator.demo.reference_check import (
    COMPARED_STEPS,
    ComparedStep,
    compare_with_reference,
    remarks,
    require_equal,
    rows_shown,
    steps_to_compare,
    table_head,
    table_row,
    verdict,
)
from swarm_coordinator.demo.run_summary import RunResult, result_document, summary_text
from swarm_coordinator.demo.subprocesses import Subprocesses
from swarm_coordinator.run_dir.checkpoint_files import CheckpointFolder
from swarm_coordinator.run_dir.folder import RunFolder, quoted
from swarm_coordinator.storage.history import History
from swarm_shared.base.atomic_file import write_atomically
from swarm_shared.base.clock import monotonic
from swarm_shared.base.errors import StorageError, UsageError
from swarm_shared.base.types import MAX_EXACT_INTEGER, PeerId
from swarm_shared.host.stop_signals import on_stop_signals
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.model_config import PRESETS

DEFAULT_FOLDER = "demo-run"
CHART_NAME = "loss.png"

SMALL_STEPS_PRESET = "tiny"
"""The preset that is trained by smaller and more steps than its own, at a higher rate, and on byte
pairs instead of bytes: that way a small model learns more in as many seconds
(docs/benchmarks.md)."""
SMALL_STEPS = 200
"""As many as keep the whole demo below four minutes on two cores."""
SEQUENCES_PER_SMALL_STEP = 32
SMALL_STEPS_SETTINGS = {
    "data.tokenizer": "bpe",
    "model.vocabulary_size": 1024,
    "optimizer.learning_rate": 5e-3,
    "optimizer.beta2": 0.99,
    # Some files of the library: the losses of single ones differ by half.
    "training.evaluation_microbatches": 32,
}
WARMUP_DIVISOR = 3
"""The warm-up takes this part of the steps; that rate with a short one learns less."""

CHECKPOINT_STEPS = 10
"""Steps between two checkpoints. Where the kill takes a stage's only peer, the run goes back to the
last one."""

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = {"bytes": 320, "bpe": 120}


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the command."""

    volunteers: int
    stages: int
    steps: int
    seed: int
    preset: str
    threads: int
    device: str
    run_dir: Path
    json_file: Path | None
    keep: bool
    kill: bool

    @property
    def kill_step(self) -> int:
        """The step after which a volunteer is killed; it is among those that are compared."""
        return kill_step(min(self.steps, COMPARED_STEPS))


@click.command("demo")
@click.option(
    "--volunteers", default=4, show_default=True, type=click.IntRange(1, 64),
    help="Number of volunteers.",
)  # fmt: skip
@click.option(
    "--stages", default=2, show_default=True, type=click.IntRange(1, 64),
    help="Number of pipeline stages.",
)  # fmt: skip
@click.option(
    "--steps",
    type=click.IntRange(1),
    help="Optimizer steps; by default as many as fit four minutes.",
)
@click.option(
    "--seed", default=1, show_default=True, type=click.IntRange(0, MAX_EXACT_INTEGER),
    help="Seed of initialisation and data order.",
)  # fmt: skip
@click.option(
    "--preset", default="tiny", show_default=True, type=click.Choice(list(PRESETS)),
    help="Preset of model and training sizes.",
)  # fmt: skip
@click.option(
    "--threads", default=1, show_default=True, type=click.IntRange(1, 256),
    help="Compute threads per volunteer.",
)  # fmt: skip
@click.option(
    "--device", default="cpu", show_default=True,
    help="Device on which all volunteers compute, in torch's spelling, such as cuda:0.",
)  # fmt: skip
@click.option(
    "--run-dir", type=click.Path(path_type=Path),
    help=f"Folder of the run; by default ./{DEFAULT_FOLDER}, or the next free name.",
)  # fmt: skip
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the result to this file.",
)  # fmt: skip
@click.option(
    "--keep/--no-keep", default=True, show_default=True,
    help="Keep the run folder after a successful run.",
)  # fmt: skip
@click.option(
    "--kill/--no-kill", default=True, show_default=True,
    help="Kill a volunteer in the middle of the run and start another one.",
)  # fmt: skip
def demo_command(
    steps: int | None, run_dir: Path | None, json_file: Path | None, **others: Any
) -> None:
    """Train a small model across processes of this machine and compare it with one process."""
    volunteers, stages, preset = others["volunteers"], others["stages"], others["preset"]
    if volunteers < stages:
        raise UsageError(
            f"{volunteers} volunteer(s) cannot hold {stages} stages, one each is needed; "
            f"give --volunteers {stages} or more, or fewer --stages"
        )
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UsageError(
            f"the folder of --json {json_file} does not exist; make it first, so that the result "
            "is not lost at the end"
        )
    steps = steps or (SMALL_STEPS if preset == SMALL_STEPS_PRESET else PRESETS[preset].steps)
    if others["kill"] and steps < FEWEST_STEPS:
        raise UsageError(
            f"a run of {steps} step has no middle in which a volunteer could be killed; give "
            f"--steps {FEWEST_STEPS} or more, or --no-kill"
        )
    run_dir = run_dir or free_folder(Path(DEFAULT_FOLDER))
    run_demo(DemoOptions(steps=steps, run_dir=run_dir, json_file=json_file, **others))


def run_demo(options: DemoOptions) -> None:
    """Make the run, train it and print a summary. All processes have ended when it returns."""
    # A sampled text may have characters that the terminal's encoding lacks.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    # All signals that ask to stop are treated like Ctrl-C, which ends all subprocesses.
    with on_stop_signals(_interrupt):
        run_dir = quoted(options.run_dir)
        with _interrupted(
            f"All processes have ended; run and logs are in {options.run_dir}. "
            f"`swarm-coordinator start {run_dir}` continues it."
        ):
            manifest = _make_run(options)
            finished, kill = _train(options)
        with _interrupted(
            f"The run itself is finished and lies in {options.run_dir}; "
            f"`swarm-coordinator reference {run_dir}` compares it with one process."
        ):
            _show_result(options, manifest, finished, kill)


def _show_result(
    options: DemoOptions, manifest: Manifest, finished: History, kill: Kill | None
) -> None:
    """Print the summary, compare the run with one process, and write the files of the result."""
    from swarm_coordinator.offline.loss_plot import draw_loss_curve  # matplotlib takes long

    folder = RunFolder(options.run_dir)
    result = RunResult(
        history=finished,
        coordinator=PeerId(manifest.organiser),
        unigram_entropy=manifest.data.unigram_entropy_nats,
        sample=_sample(folder, manifest, finished, options.seed),
        bytes_per_token=bytes_per_token(folder, manifest),
        kill=kill,
    )
    events = remarks(kill, result.joined_step)
    chart = options.run_dir / CHART_NAME
    draw_loss_curve(
        chart,
        f"{options.volunteers} volunteers, {options.stages} stages, preset {options.preset}",
        [step.step for step in finished.steps],
        [step.loss for step in finished.steps],
        result.unigram_entropy,
        finished.heldout_loss,
        events,
    )
    click.echo(f"\n{summary_text(result)}\n")
    compared = _compare(options, folder, manifest, result, events)
    if options.json_file is not None:
        text = json.dumps(result_document(result, compared), indent=2, allow_nan=False) + "\n"
        write_atomically(options.json_file, text.encode(), mode=0o644)
    require_equal(compared, folder)
    click.echo(f"{verdict(compared, len(finished.steps), kill, result.joined_step)}\n")
    if options.json_file is not None:
        click.echo(f"{'result':<14} {options.json_file}")
    if options.keep:
        click.echo(f"{'loss curve':<14} {chart}")
        click.echo(f"{'run folder':<14} {options.run_dir}  (logs in {folder.log})")
    else:
        _remove(options.run_dir)


def _compare(
    options: DemoOptions,
    folder: RunFolder,
    manifest: Manifest,
    result: RunResult,
    events: Mapping[int, str],
) -> list[ComparedStep]:
    """Compute the run again in this process, and print a table of both while it is computed."""
    steps = steps_to_compare(len(result.history.steps), result.joined_step)
    shown = rows_shown(steps)
    which = "" if len(shown) == steps else f" ({len(shown)} are shown, all are compared)"
    click.echo(f"The same {steps} steps in one process, without volunteers{which}\n{table_head()}")

    def show(one: ComparedStep) -> None:
        if one.step in events:
            click.echo(f"      -- {events[one.step]}")
        if one.step in shown or not one.equal:
            click.echo(table_row(one))

    compared = compare_with_reference(
        folder, manifest, result.history, steps, options.threads, options.device, show
    )
    click.echo()
    return compared


def _make_run(options: DemoOptions) -> Manifest:
    # Imports torch, which takes seconds; a mistyped option should not wait for it.
    from swarm_coordinator.offline.reference import usable_device
    from swarm_coordinator.run_creation.initialise import initialise_run

    usable_device(options.device)
    click.echo(f"making a run in {options.run_dir}")
    return initialise_run(
        options.run_dir,
        options.preset,
        stages=options.stages,
        overrides={
            "training.steps": options.steps,
            **_small_steps(options),
            "run.seed": options.seed,
            # All volunteers start together, so the first step waits for all of them.
            "limits.starting_peers_per_stage": options.volunteers // options.stages,
            "checkpoint.every_steps": CHECKPOINT_STEPS,
            # No other machine needs to reach the demo.
            "network.listen_host": "127.0.0.1",
            # Of strangers a quarter of the first microbatches would be computed twice.
            "trust.probation_cells": 0,
        },
        progress=lambda line: click.echo(f"  {line}"),
    )


def _small_steps(options: DemoOptions) -> dict[str, object]:
    """Return the settings of smaller steps. A step has a microbatch for each volunteer and two for
    each stage, as far as its sequences suffice, so that all compute."""
    if options.preset != SMALL_STEPS_PRESET:
        return {}
    wanted, microbatches = max(options.volunteers, 2 * options.stages), 1
    while microbatches < min(wanted, SEQUENCES_PER_SMALL_STEP):
        microbatches *= 2
    return {
        "training.microbatches_per_step": microbatches,
        "training.sequences_per_microbatch": SEQUENCES_PER_SMALL_STEP // microbatches,
        **SMALL_STEPS_SETTINGS,
        "optimizer.warmup_steps": max(2, options.steps // WARMUP_DIVISOR),
    }


def _train(options: DemoOptions) -> tuple[History, Kill | None]:
    """Start all processes, show progress, and wait until they have ended."""
    with Subprocesses() as children:
        swarm = LocalSwarm(options.run_dir, children, options.threads, options.device)
        try:
            invite = swarm.start_coordinator()
            click.echo(f"the coordinator serves the run; the invite is {invite}")
            for _ in range(options.volunteers):
                swarm.start_volunteer(invite)
            click.echo(f"started {options.volunteers} volunteers, {options.stages} stages")
            if options.kill:
                click.echo(f"after step {options.kill_step} one of them will be killed")
            finished, kill = _watch(swarm, options, invite)
        except KeyboardInterrupt:
            click.echo("stopping: the coordinator stores a checkpoint (Ctrl-C again stops at once)")
            swarm.stop()
            raise
        for child in swarm.wait_for_exit():
            click.echo(f"note: {child.name} {child.describe_exit()}; see {child.log}", err=True)
    return finished, kill


def _watch(swarm: LocalSwarm, options: DemoOptions, invite: str) -> tuple[History, Kill | None]:
    peers: list[int] = []

    def show(seen: History, status: Mapping[str, Any]) -> None:
        # After the last step all peers leave; the line keeps the counts from before.
        if len(seen.steps) < options.steps or not peers:
            peers[:] = peers_per_stage(status)
        display.show(Progress(options.steps, seen.steps, tuple(peers), _note(seen, status)))
        if options.kill:
            churn.follow(seen, status)

    def _note(seen: History, status: Mapping[str, Any]) -> str:
        if len(seen.steps) >= options.steps:
            return "" if seen.restored.finished else "evaluating and saving"
        if waiting := status.get("waiting_for"):
            return f"waiting for volunteers: {waiting}"
        return "" if seen.steps else "the first step is under way"

    with ProgressDisplay(sys.stdout, monotonic) as display:
        churn = Churn(swarm, invite, options.kill_step, display.write_line)
        return swarm.watch(show), churn.kill


def peers_per_stage(status: Mapping[str, Any]) -> list[int]:
    """Return the number of peers per stage, also while they apply a step one after another."""
    holding = [peer["stage"] for peer in status.get("peers", ()) if peer["phase"] == "ready"]
    return [holding.count(row["stage"]) for row in status.get("stages", ())]


def _sample(folder: RunFolder, manifest: Manifest, finished: History, seed: int) -> str:
    """Sample a text from the run's last checkpoint; empty without one."""
    checkpoint = finished.restored.checkpoint
    if checkpoint is None:
        return ""
    import torch

    from swarm_coordinator.evaluation.checkpoint_evaluation import written_text
    from swarm_shared.data.tokenizer import load_tokenizer

    # One token at a time is too little work for several threads.
    torch.set_num_threads(1)
    files = CheckpointFolder.of_run(folder, manifest).stage_files(checkpoint.version)
    kind = manifest.data.tokenizer
    tokenizer = load_tokenizer(kind, folder.tokenizer)
    return written_text(manifest, files, tokenizer, SAMPLE_PROMPT, SAMPLE_TOKENS[kind], seed)


def bytes_per_token(folder: RunFolder, manifest: Manifest) -> float:
    """Return the mean length of the held-out tokens that are measured."""
    from swarm_shared.data.leaf_files import ShardSamples
    from swarm_shared.data.tokenizer import load_tokenizer

    if manifest.data.tokenizer == "bytes":
        return 1.0
    tokenizer = load_tokenizer(manifest.data.tokenizer, folder.tokenizer)
    microbatches = ShardSamples(folder.data, manifest).of_evaluation()
    # One text: a character may begin in one sequence and end in the next.
    tokens = [int(token) for _, targets in microbatches for token in targets.ravel()]
    text = tokenizer.decode(tokens)
    return len(text.encode()) / len(tokens)


def free_folder(wanted: Path) -> Path:
    """Return `wanted`, or that name with the first number that is free."""
    names = itertools.chain(
        [wanted], (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    )
    return next(path for path in names if not path.exists()).absolute()


def _remove(run_dir: Path) -> None:
    try:
        shutil.rmtree(run_dir)
    except OSError as error:
        raise StorageError(f"{run_dir} cannot be removed: {error.strerror}") from error
    click.echo(f"removed {run_dir}")


@contextmanager
def _interrupted(explanation: str) -> Iterator[None]:
    """Turn Ctrl-C into an explanation and the exit code of an interrupted program."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"\nstopped. {explanation}", err=True)
        raise SystemExit(130) from None


def _interrupt() -> None:
    raise KeyboardInterrupt
