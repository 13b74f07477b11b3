"""`swarm-coordinator`: the organiser's command line.

Owns the list of commands. A command's module is imported when the command is used, so that `start`
runs without torch and `top` is on the screen at once; errors are the shared shell's
(`swarm_shared.base.command_line`).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from swarm_shared import SOFTWARE_VERSION
from swarm_shared.base.command_line import LazyGroup, run_command_line
from swarm_shared.base.errors import ConfigurationError
from swarm_shared.host.user_folders import log_folders

PROGRAM = "swarm-coordinator"
_COMMANDS = {
    "init": "cli.init",
    "start": "cli.start",
    "invite": "cli.invite",
    "status": "cli.views",
    "top": "cli.top",
    "dashboard": "cli.views",
    "history": "cli.views",
    "log": "cli.log",
    "verify": "cli.durability",
    "backup": "cli.durability",
    "restore": "cli.durability",
    "token": "cli.admission",
    "allow": "cli.admission",
    "ban": "cli.admission",
    "unban": "cli.admission",
    "trust": "cli.trust",
    "export": "cli.model",
    "reference": "cli.model",
    "ledger": "cli.ledger",
    "simulate": "cli.simulate",
    "refresh": "cli.init",
    "demo": "demo.command",
    "completion": "cli.completion",
}
"""Module of each command, in the order in which an organiser needs them; the command `NAME` is
`NAME_command` there."""

_OF_THE_EXTRA = ("fastapi", "matplotlib")
"""Modules that only the extra `coordinator` installs; a volunteer's installation has none."""


@click.group(
    cls=LazyGroup,
    modules={
        name: f"swarm_coordinator.{module}:{name}_command" for name, module in _COMMANDS.items()
    },
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(SOFTWARE_VERSION, message=f"{PROGRAM} %(version)s")
def cli() -> None:
    """Train a language model on volunteers' computers: create a run, serve it, export the model."""


def run(arguments: Sequence[str]) -> int:
    """Execute one command line and return its exit code."""
    if any(importlib.util.find_spec(name) is None for name in _OF_THE_EXTRA):
        print(
            f"{PROGRAM}: error: this installation can only volunteer; `pip install "
            "'swarmtrain[coordinator]'`, or the install script with --coordinator, installs what "
            "the coordinator needs",
            file=sys.stderr,
        )
        return ConfigurationError.exit_code

    def folders() -> list[Path]:
        """Log folders of the runs that the command line names, and of the user."""
        runs = [Path(a) / "log" for a in arguments if (Path(a) / "run.toml").is_file()]
        return [*runs, *log_folders()]

    return run_command_line(cli, PROGRAM, arguments, folders)


def main() -> None:
    """Entry point of `swarm-coordinator`."""
    sys.exit(run(sys.argv[1:]))
