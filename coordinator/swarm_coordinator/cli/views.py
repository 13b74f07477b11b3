"""The commands that show a run: status, dashboard, history.

Owns their output.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from swarm_coordinator.admission.requests import admission_status
from swarm_coordinator.cli.arguments import AS_JSON, RUN_DIR
from swarm_coordinator.durability.run_files import (
    database_location,
    load_manifest,
    load_settings,
    read_admission_book,
)
from swarm_coordinator.run_dir.folder import RunFolder, quoted
from swarm_coordinator.status.document import AdmissionStatus, current_health
from swarm_coordinator.status.status_file import read_status
from swarm_coordinator.status.text import status_lines
from swarm_coordinator.storage.history import history, steps_document
from swarm_shared.base.errors import ConfigurationError, NetworkError


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
        for line in status_lines(document, time.time()):
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
