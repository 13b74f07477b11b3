"""`swarm-coordinator`: what an organiser types.

`main` is the one place where errors become one sentence and an exit code (swarm_shared.base.errors
lists them). A command is imported when it is asked for: `start` runs without torch, and `top` is on
the screen in a moment.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import click
import platformdirs

from swarm_shared.base.errors import SwarmError
from swarm_shared.base.version import SOFTWARE_VERSION

PROGRAM = "swarm-coordinator"
_COMMANDS = {
    "init": "cli.run",
    "start": "cli.run",
    "invite": "cli.run",
    "status": "cli.run",
    "top": "cli.top",
    "dashboard": "cli.dashboard",
    "history": "cli.run",
    "verify": "cli.durability",
    "backup": "cli.durability",
    "restore": "cli.durability",
    "token": "cli.admission",
    "allow": "cli.admission",
    "ban": "cli.admission",
    "unban": "cli.admission",
    "export": "cli.model",
    "reference": "cli.model",
    "ledger": "cli.ledger",
    "simulate": "cli.simulate",
    "refresh": "cli.run",
    "demo": "demo.command",
}
"""In the order in which an organiser meets them; each is `NAME_command` in its module."""
USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130
UNEXPECTED_EXIT_CODE = 1


class _Group(click.Group):
    """Loads a command when it is asked for; for the list of all of them, all."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module = importlib.import_module(f"swarm_coordinator.{_COMMANDS[name]}")
        command: click.Command = getattr(module, f"{name}_command")
        return command


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(SOFTWARE_VERSION, message=f"{PROGRAM} %(version)s")
def cli() -> None:
    """Train a language model on volunteers' computers: create a run, serve it, export the model."""


def run(arguments: Sequence[str]) -> int:
    """Carry out one command line; its exit code. Prints at most one sentence on an error."""
    try:
        result = cli.main(list(arguments), prog_name=PROGRAM, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return USAGE_EXIT_CODE
    except click.ClickException as error:
        hint = ""
        if isinstance(error, click.UsageError) and error.ctx is not None:
            hint = f" (see `{error.ctx.command_path} --help`)"
        return _complain(f"{error.format_message()}{hint}", USAGE_EXIT_CODE)
    except SwarmError as error:
        return _complain(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        # Whoever read our output has gone (`history | head`); Python must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001 (the outermost supervisor keeps the traceback)
        return _complain(
            f"this should not have happened: {type(error).__name__}: {_one_line(error)}; "
            f"details are in {_keep_traceback(arguments)}, please report them",
            UNEXPECTED_EXIT_CODE,
        )


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def _complain(sentence: str, exit_code: int) -> int:
    print(f"{PROGRAM}: error: {sentence}", file=sys.stderr)
    return exit_code


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _keep_traceback(arguments: Sequence[str]) -> Path:
    """Into the run's log folder when the command names a run, else into the user's."""
    folders = [Path(a) / "log" for a in arguments if (Path(a) / "run.toml").is_file()]
    folders.append(Path(platformdirs.user_log_dir("swarmtrain", appauthor=False)))
    for folder in folders:
        path = folder / "coordinator-error.log"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(traceback.format_exc())
            return path
        except OSError:
            continue
    traceback.print_exc()
    return Path("the lines above")
