"""`swarm-coordinator top`: the command's options. Imports little, so that the view starts at
once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from swarm_shared.base.errors import UsageError
from swarm_shared.tui.command import open_view, view_options

PROGRAM = "swarm-coordinator top"


@click.command("top")
@click.argument("run_dir", required=False, type=click.Path(path_type=Path))
@view_options
def top_command(
    run_dir: Path | None, record: Path | None, replay: Path | None, unicode: bool | None
) -> None:
    """Show the run in RUN_DIR live: health, stages, peers, loss, events; ban peers from the list.

    It changes nothing by itself.
    """
    from swarm_shared.tui.terminal_style import this_terminal

    if (run_dir is None) == (replay is None):
        raise UsageError("name either a run's folder, or a recording with --replay FILE")
    look = this_terminal("swarm-coordinator status", unicode=unicode)
    from swarm_coordinator.run_dir.folder import RunFolder
    from swarm_coordinator.status.document import RunDocument
    from swarm_coordinator.tui.app import RunApp
    from swarm_coordinator.tui.run_source import RunFolderSource

    folder = Path() if run_dir is None else RunFolder.open(run_dir, complete=False).path
    open_view(
        PROGRAM,
        RunApp,
        lambda: RunDocument,
        lambda: RunFolderSource(folder, partial(change, folder)),
        look,
        record=record,
        replay=replay,
    )


def change(run_dir: Path, method: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Ban or unban a peer as the commands do: in the running coordinator, or without one."""
    from swarm_coordinator.admission.book import PeerBanned, PeerUnbanned
    from swarm_coordinator.cli.admission import execute_request
    from swarm_coordinator.run_dir.folder import RunFolder

    kinds = {"ban": PeerBanned, "unban": PeerUnbanned}
    return execute_request(RunFolder.open(run_dir), kinds[method](**arguments))
