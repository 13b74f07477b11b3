"""`swarm-coordinator start`.

Owns its output, the log file, and following an edited run.toml. A run is served by
`server.coordinator`.
"""

from __future__ import annotations

import logging
import logging.handlers
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import trio

from swarm_coordinator.cli.arguments import RUN_DIR
from swarm_coordinator.configuration.http_address import parse_address, tls_context
from swarm_coordinator.configuration.run_settings import RunSettings
from swarm_coordinator.core.events import Restored
from swarm_coordinator.durability.integrity_check import check_start, refuse_damage
from swarm_coordinator.durability.run_files import (
    changed_settings,
    database_location,
    load_identity,
    load_manifest,
    load_settings,
    read_progress,
)
from swarm_coordinator.run_dir.folder import RunFolder, quoted
from swarm_coordinator.server.processes.dashboard import DashboardProcess
from swarm_coordinator.server.processes.evaluator import EvaluatorProcess
from swarm_coordinator.storage.connection import DatabaseLocation, PostgresqlLocation
from swarm_coordinator.storage.leader_election import wait_for_leadership
from swarm_shared.base.atomic_file import write_atomically
from swarm_shared.base.command_line import print_event
from swarm_shared.base.errors import ConfigurationError, LeadershipError, UsageError
from swarm_shared.base.text import LogFormatter
from swarm_shared.host.python_modules import module_command
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.signed_manifest import sign_manifest
from swarm_shared.run.manifest import Manifest

LOG_BYTES = 10 * 2**20
"""Bytes of one log file; LOG_FILES older ones are kept."""
LOG_FILES = 3

_CHANGEABLE = (
    "[training] steps",
    "[training] evaluation_microbatches",
    "[limits] ",
    "[checkpoint] every_steps",
)
"""Settings that may change after the first step; the run's id does not depend on them."""


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
    folder.refuse_backup()
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
                trio.run(partial(wait_for_leadership, location, print_event, stand_by=standby))
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
        print_event(f"taking over despite damage: {check.sentence}")
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
        context = CoordinatorContext(
            folder=folder,
            settings=settings,
            manifest=manifest,
            identity=identity,
            store=store,
            report=print_event,
            port=port,
            verified=checkpoint,
            on_serving=_print_serving_finished
            if over
            else _print_serving(folder, settings, manifest),
            dashboard_process=_dashboard_process(folder, http),
            evaluator_process=EvaluatorProcess(folder, print_event)
            if settings.evaluation.every_steps
            else None,
        )
        trio.run(serve, context)
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
    return DashboardProcess(folder, replace(parse_address(listen), tls=tls), print_event)


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
            module_command("swarm_coordinator", "refresh", str(folder.path)),
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
        LogFormatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    # A full disk must not print a traceback for each line that cannot be logged.
    logging.raiseExceptions = False
