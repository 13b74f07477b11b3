"""`swarm-client top`: the words of the command. It imports little: a view starts at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm_client.commands.base import home_option, socket_of

if TYPE_CHECKING:
    from swarm_client.control.documents import Status
    from swarm_shared.tui.look import Look
    from swarm_shared.tui.source import Source

PROGRAM = "swarm-client top"


@click.command("top")
@home_option
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep what is seen in this new file.",
)
@click.option(
    "--replay",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Show a recording instead of the daemon.",
)
@click.option(
    "--unicode/--ascii",
    "unicode",
    default=None,
    help="Draw with Unicode, or with ASCII alone. [default: as the locale says]",
)
def top(home: Path | None, record: Path | None, replay: Path | None, unicode: bool | None) -> None:
    """Watch what this machine does for the run, pause it, change its limits."""
    from swarm_shared.tui.terminal import this_terminal

    look = this_terminal("swarm-client status", unicode=unicode)
    _show(_source(home, replay), look, record)


def _source(home: Path | None, replay: Path | None) -> Source[Status]:
    from swarm_client.control.documents import Status

    if replay is not None:
        from swarm_shared.tui.recording import Replay

        return Replay(replay, PROGRAM, Status)
    from swarm_client.tui.socket_source import SocketSource

    return SocketSource(socket_of(home))


def _show(source: Source[Status], look: Look, record: Path | None) -> None:
    from swarm_client.tui.app import ClientView
    from swarm_shared.tui.app import run_view
    from swarm_shared.tui.recording import Recorder

    recorder = Recorder(record, PROGRAM, source.now) if record is not None else None
    run_view(ClientView(source, look, recorder), recorder)
