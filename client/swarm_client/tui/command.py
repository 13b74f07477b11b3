"""`swarm-client top`: the command's arguments. It imports little, so that a view starts at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm_client.cli.options import home_option, socket_of
from swarm_shared.tui.command import open_view, view_options

if TYPE_CHECKING:
    from swarm_client.control.status_document import Status

PROGRAM = "swarm-client top"


@click.command("top")
@home_option
@view_options
def top(home: Path | None, record: Path | None, replay: Path | None, unicode: bool | None) -> None:
    """Show what this machine does for the run, live; pause it and change its limits."""
    from swarm_shared.tui.terminal_style import this_terminal

    look = this_terminal("swarm-client status", unicode=unicode)
    from swarm_client.tui.app import ClientApp
    from swarm_client.tui.socket_source import SocketSource

    open_view(
        PROGRAM,
        ClientApp,
        _status,
        lambda: SocketSource(socket_of(home)),
        look,
        record=record,
        replay=replay,
    )


def _status() -> type[Status]:
    from swarm_client.control.status_document import Status

    return Status
