"""`swarm-coordinator completion`: the completion script of a shell."""

from __future__ import annotations

import click

from swarm_shared.base.command_line import COMPLETED_SHELLS, completion_script


@click.command("completion")
@click.argument("shell", type=click.Choice(COMPLETED_SHELLS))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print the completion script for SHELL.

    bash: eval "$(swarm-coordinator completion bash)" in ~/.bashrc; zsh likewise in ~/.zshrc; fish:
    swarm-coordinator completion fish > ~/.config/fish/completions/swarm-coordinator.fish
    """
    click.echo(completion_script(context.find_root().command, "swarm-coordinator", shell))
