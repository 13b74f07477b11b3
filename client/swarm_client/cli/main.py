"""`swarm-client`: the volunteer's command line.

Owns the list of commands and the welcome text. A command's module is imported when the command is
used, so that `top` and shell completion start at once; errors are the shared shell's
(`swarm_shared.base.command_line`).
"""

from __future__ import annotations

import sys

import click

from swarm_shared import SOFTWARE_VERSION
from swarm_shared.base.command_line import LazyGroup, run_command_line
from swarm_shared.host.user_folders import log_folders

PROGRAM = "swarm-client"

WELCOME = """\
swarm-client lends this computer to the training of a large language model.

  swarm-client doctor INVITE         checks this machine and the path to the run; changes nothing
  swarm-client join INVITE           takes part until you press Ctrl-C
  swarm-client join INVITE --detach  takes part in the background
  swarm-client status                shows what the program does, or why it computes nothing
  swarm-client top                   shows all of it live on one screen
  swarm-client pause --for 2h        computes nothing for two hours; `resume` ends that
  swarm-client leave                 hands the work over and leaves the run
  swarm-client service install       starts the program at every login
An INVITE is a line that begins with swarm1; the organiser of a run gives it to you.
All commands: swarm-client --help"""


_COMMANDS = {
    "join": "cli.join:join",
    "status": "cli.daemon_commands:status",
    "top": "tui.command:top",
    "pause": "cli.daemon_commands:pause",
    "resume": "cli.daemon_commands:resume",
    "finish": "cli.daemon_commands:finish",
    "leave": "cli.daemon_commands:leave",
    "config": "cli.config:config",
    "doctor": "cli.offline:doctor",
    "credit": "cli.offline:credit",
    "logs": "cli.daemon_commands:logs",
    "runs": "cli.daemon_commands:runs",
    "paths": "cli.offline:paths",
    "service": "cli.service:service",
    "daemon": "cli.join:daemon",
    "shutdown": "cli.daemon_commands:shutdown",
    "update": "cli.update:update",
    "completion": "cli.offline:completion",
    "version": "cli.offline:version",
    "verify-ledger": "cli.verify_ledger:verify_ledger_command",
}
"""Module and attribute of each command, in the order in which a volunteer needs them."""


@click.group(
    cls=LazyGroup,
    modules={name: f"swarm_client.{command}" for name, command in _COMMANDS.items()},
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(SOFTWARE_VERSION, prog_name=PROGRAM)
@click.pass_context
def swarm_client(context: click.Context) -> None:
    """Lend this computer to the training of a large model."""
    if context.invoked_subcommand is None:
        click.echo(WELCOME)


def main() -> None:
    """Entry point of `swarm-client`."""
    sys.exit(run_command_line(swarm_client, PROGRAM, sys.argv[1:], log_folders))
