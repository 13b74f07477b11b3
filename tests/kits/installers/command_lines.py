"""Command lines of the product, parsed by its own click commands without carrying them out."""

from __future__ import annotations

from collections.abc import Sequence

import click

from swarm_client.cli.main import swarm_client
from swarm_coordinator.cli.main import cli as swarm_coordinator

PROGRAMS: dict[str, click.Group] = {
    "swarm-client": swarm_client,
    "swarm-coordinator": swarm_coordinator,
}


def parse(words: Sequence[str]) -> click.Context:
    """Return the context of the command; click.UsageError for what the program would refuse.

    Options of a program itself, such as `--version`, are not among `words`.
    """
    name, *rest = words
    command: click.Command = PROGRAMS[name]
    context: click.Context | None = None
    while isinstance(command, click.Group) and rest:
        context = click.Context(command, parent=context, info_name=name)
        name, *rest = rest
        found = command.get_command(context, name)
        if found is None:
            raise click.UsageError(f"No such command {name!r}.", context)
        command = found
    return command.make_context(name, rest, parent=context)
