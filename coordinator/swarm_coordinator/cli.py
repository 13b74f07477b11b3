"""`swarm-coordinator`: what an organiser types.

`main` is the one place where errors become one sentence and an exit code (swarm_shared.errors
lists them). Heavy imports happen inside the commands that need them: `start` runs without torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import click
import platformdirs

from swarm_coordinator.commands_admission import (
    allow_command,
    ban_command,
    token_command,
    unban_command,
)
from swarm_coordinator.commands_dashboard import dashboard_command
from swarm_coordinator.commands_durability import (
    backup_command,
    restore_command,
    verify_command,
)
from swarm_coordinator.commands_ledger import ledger_command
from swarm_coordinator.commands_model import export_command, reference_command
from swarm_coordinator.commands_run import (
    history_command,
    init_command,
    invite_command,
    refresh_command,
    start_command,
    status_command,
)
from swarm_coordinator.commands_simulate import simulate_command
from swarm_shared.errors import SwarmError
from swarm_shared.messages import SOFTWARE_VERSION

PROGRAM = "swarm-coordinator"
_DEMO_MODULE = "swarm_coordinator.demo"
USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130
UNEXPECTED_EXIT_CODE = 1


class _Group(click.Group):
    """Commands in the order in which an organiser meets them.

    `demo` draws charts and is loaded when it is asked for: the service must stay light.
    """

    def list_commands(self, context: click.Context) -> list[str]:
        names = list(self.commands)
        return [*names, "demo"] if importlib.util.find_spec(_DEMO_MODULE) else names

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name == "demo" and importlib.util.find_spec(_DEMO_MODULE):
            command: click.Command = importlib.import_module(_DEMO_MODULE).demo_command
            return command
        return super().get_command(context, name)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(SOFTWARE_VERSION, message=f"{PROGRAM} %(version)s")
def cli() -> None:
    """Train a language model on volunteers' computers: make a run, serve it, take it home."""


for _command in (
    init_command, start_command, invite_command, status_command, dashboard_command,
    history_command, verify_command, backup_command, restore_command, token_command,
    allow_command, ban_command, unban_command, export_command, reference_command,
    ledger_command, simulate_command, refresh_command,
):  # fmt: skip
    cli.add_command(_command)


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


if __name__ == "__main__":
    main()
