"""The options that both `top` commands share, and how they open a view.

It imports little: the drawing modules are loaded after the arguments are parsed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from pydantic import BaseModel

    from swarm_shared.tui.app import ViewApp
    from swarm_shared.tui.recording import Recorder
    from swarm_shared.tui.source import Source
    from swarm_shared.tui.terminal_style import Look

D = TypeVar("D", bound="BaseModel")
Command = TypeVar("Command", bound=Callable[..., Any])

_FILE = click.Path(path_type=Path, dir_okay=False)


def view_options(command: Command) -> Command:
    """--record, --replay and --unicode/--ascii."""
    for option in (
        click.option(
            "--unicode/--ascii", "unicode", default=None,
            help="Draw with Unicode, or with ASCII only.  [default: by the locale]",
        ),
        click.option("--replay", type=_FILE, help="Show a recording instead of the live state."),
        click.option("--record", type=_FILE, help="Record what is shown to this new file."),
    ):  # fmt: skip
        command = option(command)
    return command


def open_view(
    program: str,
    view: Callable[[Source[D], Look, Recorder | None], ViewApp[D]],
    document: Callable[[], type[D]],
    live: Callable[[], Source[D]],
    look: Look,
    *,
    record: Path | None,
    replay: Path | None,
) -> None:
    """Show the live source, or a recording of `program`, until the view is closed."""
    from swarm_shared.tui.app import run_view

    source, recorder = live() if replay is None else None, None
    if source is None or record is not None:
        from swarm_shared.tui.recording import Recorder, Replay

        if replay is not None:
            source = Replay(replay, program, document())
        assert source is not None
        recorder = None if record is None else Recorder(record, program, source.now)
    run_view(view(source, look, recorder), recorder)
