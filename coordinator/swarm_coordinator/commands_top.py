"""`swarm-coordinator top`: the words of the command. It imports little: a view starts at once."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("top")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--unicode/--ascii",
    "unicode",
    default=None,
    help="Draw with Unicode, or with ASCII alone. [default: as the locale says]",
)
def top_command(run_dir: Path, unicode: bool | None) -> None:
    """Watch the run in RUN_DIR: health, stages, peers, loss, events. Changes nothing."""
    from swarm_coordinator.run_folder import RunFolder
    from swarm_coordinator.tui.app import RunView
    from swarm_coordinator.tui.reading import RunFolderSource
    from swarm_shared.tui.app import run_view
    from swarm_shared.tui.terminal import this_terminal

    look = this_terminal("swarm-coordinator status", unicode=unicode)
    RunFolder.open(run_dir, complete=False)
    run_view(RunView(RunFolderSource(run_dir), look), None)
