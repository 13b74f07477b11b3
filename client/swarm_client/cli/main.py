"""`swarm-client`: the volunteer's command line. Each command is in a module of this package.

`main` is the one place where errors become one sentence and an exit code. A command is imported
when it is asked for: `top` is on the screen in a moment, and shell completion answers at once.
"""

from __future__ import annotations

import importlib
import os
import sys

import click

from swarm_shared.base.error_groups import expected_error, leaves
from swarm_shared.base.version import SOFTWARE_VERSION

INTERRUPTED = 130
"""Shell convention: 128 + SIGINT."""

WELCOME = """\
swarm-client lends this computer to the training of a large language model.

  swarm-client doctor INVITE         checks this machine and the way to the run; changes nothing
  swarm-client join INVITE           takes part, until you press Ctrl-C
  swarm-client join INVITE --detach  takes part behind the terminal
  swarm-client status                says what it does, or why it does nothing
  swarm-client top                   shows it all on one screen, live
  swarm-client pause --for 2h        leaves the machine to you; `resume` goes on
  swarm-client leave                 hands its work over and stops
  swarm-client service install       starts it by itself at every login
An INVITE is a line that begins with swarm1; whoever organises a run gives it to you.
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
    "completion": "cli.offline:completion",
    "version": "cli.offline:version",
    "verify-ledger": "cli.verify_ledger:verify_ledger_command",
}
"""In the order in which a volunteer meets them: each in its module."""


class _Group(click.Group):
    """Loads a command when it is asked for; for the list of all of them, all."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[name].partition(":")
        command: click.Command = getattr(
            importlib.import_module(f"swarm_client.{module}"), attribute
        )
        return command


@click.group(
    cls=_Group,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(SOFTWARE_VERSION, prog_name="swarm-client")
@click.pass_context
def swarm_client(context: click.Context) -> None:
    """Lend this computer to the training of a large model."""
    if context.invoked_subcommand is None:
        click.echo(WELCOME)


def main() -> None:
    """Entry point: every expected error is one sentence and its exit code, never a traceback."""
    try:
        swarm_client.main(prog_name="swarm-client", standalone_mode=False)
    except click.exceptions.Exit as request:
        sys.exit(request.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        hint = ""
        if isinstance(error, click.UsageError) and error.ctx is not None:
            hint = f" (see `{error.ctx.command_path} --help`)"
        click.echo(f"swarm-client: error: {error.format_message()}{hint}", err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has gone (`logs | head`); Python must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except BaseExceptionGroup as group:
        _fail(group)
    except Exception as error:  # noqa: BLE001  the outermost supervisor: logged in full, told in a sentence
        _fail(error)


def _fail(error: BaseException) -> None:
    expected = expected_error(error)
    if expected is not None:
        click.echo(f"swarm-client: error: {expected}", err=True)
        sys.exit(expected.exit_code)
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves(error)):
        sys.exit(INTERRUPTED)
    import traceback

    import platformdirs

    try:
        folder = platformdirs.user_log_path("swarmtrain", appauthor=False, ensure_exists=True)
        path = folder / "swarm-client-error.log"
        path.write_text("".join(traceback.format_exception(error)))
        where = f"the details are in {path}"
    except OSError:
        where = f"it was {error!r}"
    click.echo(
        f"swarm-client: error: an unexpected fault of this program; {where}; please report it",
        err=True,
    )
    sys.exit(1)
