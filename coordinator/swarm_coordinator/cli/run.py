"""The commands of a run: init, start, invite, status, dashboard, history, refresh.

Owns their output, the log file, and following an edited run.toml at a start. A run is made by
`run_creation.initialise` and served by `server.coordinator`.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import trio

from swarm_coordinator.admission.requests import admission_status
from swarm_coordinator.configuration.command_line import parse_codec, parse_override
from swarm_coordinator.configuration.http_address import parse_address, tls_context
from swarm_coordinator.configuration.run_settings import (
    DEFAULT_PRESET,
    RunSettings,
)
from swarm_coordinator.core.events import Restored
from swarm_coordinator.durability.integrity_check import check_start, refuse_damage
from swarm_coordinator.durability.run_files import (
    changed_settings,
    database_location,
    load_identity,
    load_manifest,
    load_settings,
    read_admission_book,
    read_progress,
)
from swarm_coordinator.model_hub.models import HubModel
from swarm_coordinator.run_dir.folder import RunFolder, quoted
from swarm_coordinator.server.listen_addresses import dialable_addresses, listen_address
from swarm_coordinator.server.processes.dashboard import DashboardProcess
from swarm_coordinator.server.processes.evaluator import EvaluatorProcess
from swarm_coordinator.status.document import AdmissionStatus, current_health
from swarm_coordinator.status.status_file import read_status
from swarm_coordinator.status.text import status_lines
from swarm_coordinator.storage.connection import DatabaseLocation, PostgresqlLocation
from swarm_coordinator.storage.history import history, steps_document
from swarm_coordinator.storage.leader_election import wait_for_leadership
from swarm_shared.base.atomic_file import write_atomically
from swarm_shared.base.errors import ConfigurationError, LeadershipError, NetworkError, UsageError
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.signed_manifest import sign_manifest
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.model_config import PRESETS

LOG_BYTES = 10 * 2**20
"""Bytes of one log file; LOG_FILES older ones are kept."""
LOG_FILES = 3

RUN_DIR = click.argument("run_dir", type=click.Path(path_type=Path))
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")

_CHANGEABLE = (
    "[training] steps",
    "[training] evaluation_microbatches",
    "[limits] ",
    "[checkpoint] every_steps",
)
"""Settings that may change after the first step; the run's id does not depend on them."""


# ---------------------------------------------------------------- init


@click.command("init")
@RUN_DIR
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    help=f"Preset of model and training sizes; by default {DEFAULT_PRESET}, or the nearest to the "
    "model of --from.",
)
@click.option(
    "--from",
    "given_model",
    metavar="FOLDER|ORG/NAME",
    help="Continue from a model (Llama, Mistral, Qwen2, Qwen3): a folder in Hugging Face's format, "
    "or a model on its hub, also as ORG/NAME@REVISION.",
)
@click.option(
    "--data",
    default="python-stdlib",
    show_default=True,
    help="Training data: a file or folder of text, .jsonl, .parquet or .arrow, also compressed "
    "(.gz, .zst); a folder of ready shards; a data set of the Hugging Face hub, "
    "hf://datasets/ORG/NAME[@REVISION][/FOLDER_OR_GLOB]; or python-stdlib.",
)
@click.option(
    "--stages",
    type=int,
    help="Number of pipeline stages; by default the preset's, or the best one for --fleet.",
)
@click.option(
    "--fleet",
    metavar="FILE|home|N",
    help="Cut the model for the machines that are expected: a file as for `simulate`, the built-in "
    "home machines, or a number of them.",
)
@click.option("--steps", type=int, help="Optimizer steps of the run; by default the preset's.")
@click.option("--seed", type=int, help="Seed of initialisation and data order.")
@click.option(
    "--tokenizer",
    metavar="bytes|bpe|FILE",
    help="Tokenizer: bytes, bpe trained on the data, a tokenizer.json, or a vocabulary with one "
    "token a line; by default the preset's.",
)
@click.option(
    "--codec",
    metavar="auto|NAME|NAME/NAME",
    help="Codecs between stages: none, int8, … for both directions, int8/int4 for activations and "
    "gradients, or auto: the fastest pair here whose measured loss is within the limit.",
)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="SECTION.NAME=VALUE",
    help="Any other setting of run.toml; may be repeated.",
)
def init_command(
    run_dir: Path,
    preset: str | None,
    given_model: str | None,
    data: str,
    stages: int | None,
    fleet: str | None,
    steps: int | None,
    seed: int | None,
    tokenizer: str | None,
    codec: str | None,
    changes: tuple[str, ...],
) -> None:
    """Create a run: settings, data, key and signed manifest in RUN_DIR.

    A step's sequences are divided into microbatches as small as their overhead allows, unless
    `--set training.sequences_per_microbatch=N` or `training.microbatches_per_step` is given.

    `--fleet` prints for 2 to 16 stages what share of the machines can hold one and how many tokens
    a second they would train.
    """
    overrides = dict(parse_override(change) for change in changes)
    for name, value in (
        ("training.steps", steps),
        ("run.seed", seed),
        ("data.tokenizer", tokenizer),
    ):
        if value is not None:
            overrides[name] = value
    if codec is not None:
        overrides |= parse_codec(codec)
    from swarm_coordinator.run_creation.initialise import initialise_run

    model = None if given_model is None else _folder_or_hub_model(given_model)
    initialise_run(run_dir, preset, data, stages, overrides, click.echo, fleet, model)
    click.echo(f"edit {run_dir / 'run.toml'} if you like, then:")
    click.echo(f"  swarm-coordinator start {quoted(run_dir)}")


def _folder_or_hub_model(given: str) -> Path | HubModel:
    """A folder that exists comes before a model of the same name on the hub."""
    folder = Path(given)
    return folder if folder.expanduser().exists() else HubModel.parse(given) or folder


# ---------------------------------------------------------------- start


@click.command("start")
@RUN_DIR
@click.option("--port", type=click.IntRange(1, 65_535), help="TCP port to listen on.")
@click.option(
    "--http",
    "http",
    metavar="HOST:PORT",
    help='Address of the dashboard instead of [http] listen in run.toml; "" for none.',
)
@click.option(
    "--standby",
    is_flag=True,
    help="Wait while another coordinator serves the run; take over when it stops (PostgreSQL).",
)
def start_command(run_dir: Path, port: int | None, http: str | None, standby: bool) -> None:
    """Serve the run in RUN_DIR and print the invite.

    Ctrl-C finishes the step, stores a checkpoint and stops. When the run finishes, this ends by
    itself; started again, it tells volunteers that the run is over and serves the model to members
    until Ctrl-C.
    """
    folder = RunFolder.open(run_dir)
    _dashboard_process(folder, http)  # refuses what could not be served, before anything starts
    with folder.lock():
        location = database_location(folder)
        remote = isinstance(location, PostgresqlLocation)
        if standby and not remote:
            raise UsageError(
                "--standby needs a database that both coordinators reach; set [coordinator] store "
                "in run.toml to the address of a PostgreSQL server"
            )
        _log_to(folder.log / "coordinator.log")
        while True:
            if isinstance(location, PostgresqlLocation):
                trio.run(partial(wait_for_leadership, location, _report, stand_by=standby))
            if _serve(folder, location, port, http, standby):
                return


def _serve(
    folder: RunFolder, location: DatabaseLocation, port: int | None, http: str | None, standby: bool
) -> bool:
    """Serve the run to its end, or a finished one until Ctrl-C. False when another standby has
    taken over first."""
    from swarm_coordinator.server.coordinator import serve
    from swarm_coordinator.server.startup import CoordinatorContext
    from swarm_coordinator.storage.store import open_store

    settings, manifest = load_settings(folder), load_manifest(folder)
    checkpoint, check = check_start(folder, manifest)
    if standby and check.findings:
        # No organiser is there to decide, and volunteers hold newer state than any checkpoint.
        _report(f"taking over despite damage: {check.sentence}")
    else:
        refuse_damage(check)
    restored = read_progress(folder)
    manifest = _follow_settings(folder, settings, manifest, restored)
    over = restored is not None and _is_finished(restored, manifest)
    if restored is not None and over:
        _print_finished(folder, restored, elsewhere=checkpoint is None)
        if standby:  # it has finished while this one stood by
            return True
    identity = load_identity(folder)
    store = open_store(location)
    try:
        service = CoordinatorContext(
            folder=folder,
            settings=settings,
            manifest=manifest,
            identity=identity,
            store=store,
            report=_report,
            port=port,
            verified=checkpoint,
            on_serving=_print_serving_finished
            if over
            else _print_serving(folder, settings, manifest),
            dashboard_process=_dashboard_process(folder, http),
            evaluator_process=EvaluatorProcess(folder, _report)
            if settings.evaluation.every_steps
            else None,
        )
        trio.run(serve, service)
    except LeadershipError:
        if standby and not store.leads:
            return False
        raise
    finally:
        store.close()
    end = read_progress(folder)
    if not over and end is not None and _is_finished(end, manifest):
        _print_finished(folder, end)
    return True


def _dashboard_process(folder: RunFolder, listen: str | None) -> DashboardProcess | None:
    """Return the dashboard at an address, by default run.toml's; None without one."""
    http = load_settings(folder).http
    listen = http.listen if listen is None else listen
    if not listen:
        return None
    tls = tls_context(folder.path, http.certificate, http.key) is not None
    return DashboardProcess(folder, replace(parse_address(listen), tls=tls), _report)


def _follow_settings(
    folder: RunFolder, settings: RunSettings, manifest: Manifest, restored: Restored | None
) -> Manifest:
    """Follow an edited run.toml: sign the manifest anew, or raise ConfigurationError."""
    differences = changed_settings(folder, settings, manifest)
    if not differences:
        return manifest
    if restored is None or restored.version == 0:
        # In a process of its own: planning the stages needs torch, serving the run does not.
        done = subprocess.run(
            [sys.executable, "-m", "swarm_coordinator", "refresh", str(folder.path)],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode != 0:
            text = done.stderr.strip().removeprefix("swarm-coordinator: error: ")
            raise ConfigurationError(text or "the changed run.toml could not be followed")
        for line in done.stdout.splitlines():
            click.echo(line)
    elif all(difference.startswith(_CHANGEABLE) for difference in differences):
        changed = manifest.model_copy(
            update={
                "training": settings.training_config,
                "limits": settings.limits,
                "checkpoint_steps": settings.checkpoint.every_steps,
            }
        )
        write_atomically(folder.manifest, sign_manifest(load_identity(folder), changed))
    else:
        kept = [d for d in differences if not d.startswith(_CHANGEABLE)]
        raise ConfigurationError(
            f"the run has applied {restored.version} steps and cannot be changed in this way any "
            f"more: {'; '.join(kept)}; change it back, or make a new run with "
            f"`swarm-coordinator init`"
        )
    for difference in differences:
        click.echo(f"following run.toml: {difference.split(' in run.toml')[0]}")
    return load_manifest(folder)


def _is_finished(restored: Restored, manifest: Manifest) -> bool:
    return restored.finished and restored.version >= manifest.training.steps


def _print_finished(folder: RunFolder, restored: Restored, *, elsewhere: bool = False) -> None:
    """Print that the run is over, and where the model is. `elsewhere`: a standby's folder does not
    have it."""
    heldout = restored.heldout_loss
    loss = f", held-out loss {heldout:.4f}" if heldout is not None else ""
    ended = f"the run has finished after {restored.version} steps{loss}"
    if elsewhere:
        click.echo(f"{ended}; the model is on the machine whose coordinator finished it")
        return
    click.echo(f"{ended}; the model is in {folder.checkpoints}, as safetensors files")
    if not load_manifest(folder).model.bottlenecks:
        command = f"swarm-coordinator export {quoted(folder.path)} OUT_FOLDER"
        click.echo(f"export the model with: {command}")
    click.echo(f"or raise [training] steps in {folder.settings} and start again")


def _print_serving(folder: RunFolder, settings: RunSettings, manifest: Manifest) -> Any:
    mode = settings.admission.mode

    def print_invite(invite: Invite) -> None:
        click.echo(
            f"serving {manifest.name}: {manifest.stage_count} stage(s), "
            f"{manifest.training.steps} steps, at {', '.join(invite.addresses)}"
        )
        if mode == "token" and invite.token is None:
            click.echo(f"make invites with `swarm-coordinator token create {quoted(folder.path)}`")
        else:
            listed = " on the list (`swarm-coordinator allow`)"
            click.echo(
                f"a volunteer{listed if mode == 'allow-list' else ''} joins with "
                "`swarm-client join` and this invite:"
            )
            click.echo(invite.encode())
        sys.stdout.flush()

    return print_invite


def _print_serving_finished(invite: Invite) -> None:
    click.echo(
        f"serving the model to members at {', '.join(invite.addresses)}, and telling volunteers "
        "that the run is over; Ctrl-C stops"
    )
    sys.stdout.flush()


def _report(line: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')} {line}")
    sys.stdout.flush()


def _log_to(path: Path) -> None:
    """Log this process to rotated files; without them if they cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=LOG_BYTES, backupCount=LOG_FILES, encoding="utf-8"
        )
    except OSError as error:
        click.echo(
            f"no log can be written to {path} ({error.strerror}); going on without", err=True
        )
        return
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    # A full disk must not print a traceback for each line that cannot be logged.
    logging.raiseExceptions = False


@click.command("refresh", hidden=True)
@RUN_DIR
def refresh_command(run_dir: Path) -> None:
    """Sign the manifest again after an edit of run.toml; `start` runs this automatically."""
    from swarm_coordinator.run_creation.initialise import refresh_manifest

    folder = RunFolder.open(run_dir)
    restored = read_progress(folder)
    if restored is not None and restored.version > 0:
        raise ConfigurationError(f"the run has applied {restored.version} steps already")
    refresh_manifest(folder, click.echo)


# ---------------------------------------------------------------- looking at a run


def run_addresses(folder: RunFolder, settings: RunSettings) -> tuple[str, ...]:
    """Return the coordinator's addresses: the present ones if it runs, otherwise the next
    start's."""
    document = read_status(folder.status) if folder.in_use() else None
    if document is not None and document.running:
        return document.addresses
    network = settings.network
    port = network.listen_port or folder.remembered_port()
    listen_address(network.listen_host, port or 0)
    if port is None:
        port = _free_port(network.listen_host)
        folder.remember_port(port)
    return dialable_addresses(network.listen_host, port, network.announce)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise NetworkError(
            f"no free port on {host} ({error.strerror}); check [network] listen_host"
        ) from error


@click.command("status")
@RUN_DIR
@AS_JSON
def status_command(run_dir: Path, as_json: bool) -> None:
    """Show the state of the run in RUN_DIR, whether its coordinator runs or not."""
    folder = RunFolder.open(run_dir)
    document = read_status(folder.status)
    running = folder.in_use() and document is not None and document.pid == _lock_holder(folder)
    if document is None:
        name = load_manifest(folder).name
        if as_json:
            never = {"run": name, "phase": "never started", "running": running}
            click.echo(json.dumps(never, indent=1))
        else:
            how = f"swarm-coordinator start {quoted(run_dir)}"
            click.echo(f"{name} has not been started yet: {how}")
        return
    if not running:
        admission = _admission_now(folder) or document.admission
        document = document.model_copy(update={"admission": admission, "running": False})
        document = document.model_copy(update={"health": current_health(document, time.time())})
    if as_json:
        click.echo(document.model_dump_json(indent=1))
    else:
        for line in status_lines(document, running, time.time()):
            click.echo(line)


def _admission_now(folder: RunFolder) -> AdmissionStatus | None:
    """Admission as the database and run.toml have it, newer than a stopped coordinator's status.

    None if run.toml is broken, which is no reason to show no status.
    """
    try:
        mode = load_settings(folder).admission.mode
    except ConfigurationError:
        return None
    return admission_status(read_admission_book(folder), mode, time.time(), attached=0)


def _lock_holder(folder: RunFolder) -> int | None:
    try:
        text = folder.lock_file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() else None


@click.command("dashboard")
@RUN_DIR
def dashboard_command(run_dir: Path) -> None:
    """Print the link to the dashboard of the run in RUN_DIR, with the organiser's token.

    The link opens the organiser's view for every bearer. The token is in the fragment (after #),
    which browsers do not send.
    """
    folder = RunFolder.open(run_dir)
    status = read_status(folder.status) if folder.in_use() else None
    if status is None or not status.running:
        raise NetworkError(
            f"no coordinator serves this run now; `swarm-coordinator start {quoted(run_dir)}` does"
        )
    if status.http.url is None:
        raise NetworkError(
            "this coordinator serves no dashboard: [http] listen in run.toml is empty, or its port "
            "is taken (the coordinator reported that when it started)"
        )
    click.echo(f"{status.http.url}#token={folder.dashboard_token()}")


@click.command("history")
@RUN_DIR
@AS_JSON
def history_command(run_dir: Path, as_json: bool) -> None:
    """Print every applied step of the run in RUN_DIR; needs no running coordinator."""
    found = history(database_location(RunFolder.open(run_dir)))
    if as_json:
        click.echo(json.dumps(steps_document(found.steps)))
        return
    click.echo(f"{'step':>8} {'loss':>10} {'tokens':>10} {'seconds':>9}")
    for step in found.steps:
        click.echo(f"{step.step:>8} {step.loss:>10.4f} {step.tokens:>10} {step.seconds:>9.2f}")
    if found.heldout_loss is not None:
        click.echo(f"held-out loss: {found.heldout_loss:.4f}")
