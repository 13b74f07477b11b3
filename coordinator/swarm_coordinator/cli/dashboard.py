"""`swarm-coordinator dashboard`: the link to the organiser's dashboard."""

from __future__ import annotations

from pathlib import Path

import click

from swarm_coordinator.cli.run import RUN_DIR
from swarm_coordinator.run_dir.folder import RunFolder, quoted
from swarm_coordinator.status.status_file import read_status
from swarm_shared.base.errors import NetworkError


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
