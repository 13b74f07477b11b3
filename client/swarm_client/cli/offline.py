"""Commands that need no daemon: credit, doctor, paths, completion, version."""

from __future__ import annotations

import datetime
import logging
import shutil
import sys
from pathlib import Path

import click

from swarm_client.cli.options import home_option, invite_argument, json_option, print_json
from swarm_client.machine.device_names import FORMS, check_name
from swarm_client.machine.home import Home
from swarm_shared import SOFTWARE_VERSION
from swarm_shared.base.command_line import COMPLETED_SHELLS, completion_script

PROGRAM = "swarm-client"


@click.command()
@home_option
@json_option
def credit(home: Path | None, as_json: bool) -> None:
    """Show what this machine has contributed, from its own contribution log."""
    from swarm_client.cli.text import contribution_text
    from swarm_client.control.client import NoDaemon, ask
    from swarm_client.control.contribution_log import ContributionLog
    from swarm_client.control.status_document import ContributionView, Status
    from swarm_client.control.stored_file import read_document

    place = Home.locate(home)
    try:
        view: ContributionView = Status.model_validate(
            ask(place.socket_path, "status")
        ).contribution
    except NoDaemon:
        stored = read_document(place.contribution_path, ContributionLog())
        view = stored.view(datetime.datetime.now().date())
    if as_json:
        print_json(view.model_dump(mode="json"))
    else:
        click.echo(contribution_text(view))


@click.command()
@invite_argument(required=False)
@home_option
@click.option("--device", default="auto", show_default=True, help=f"Device to check: {FORMS}.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
@click.option(
    "--self-test",
    is_flag=True,
    help="Also test whether the device computes the same each time and its memory keeps its "
    "content: uses all cores but one, and half of the memory on offer.",
)
@click.option(
    "--self-test-seconds", type=click.FloatRange(1.0, 86_400.0), default=60.0, show_default=True,
    help="Duration of the self-test; a fault that is rare takes longer to show.",
)  # fmt: skip
def doctor(
    invite: str | None, home: Path | None, device: str, as_json: bool, self_test: bool,
    self_test_seconds: float,
) -> None:  # fmt: skip
    """Check this machine and the path to the run that INVITE names, within half a minute.

    With - as INVITE it is read from standard input. With --self-test it takes that much longer.

    Downloads nothing and changes nothing in the home. The exit code is 0 if no check failed
    (warnings do not fail a check), otherwise that of the first failed check.
    """
    from swarm_shared.identity.invite import Invite

    decoded = None if invite is None else Invite.decode(invite)
    check_name(device)

    import trio

    from swarm_client.doctor.checkup import DoctorOptions, check_up, seconds_left
    from swarm_client.doctor.report import table
    from swarm_client.machine.log_file import LOGGERS
    from swarm_shared.base.text import duration_text

    # What a person needs is in the table.
    for logger in LOGGERS:
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    test_seconds = self_test_seconds if self_test else 0.0
    if sys.stderr.isatty():
        longest = duration_text(30.0 + test_seconds)
        click.echo(f"checking this machine; this takes {longest} at most …", err=True)
    options = DoctorOptions(
        decoded, home, device, total_seconds=seconds_left(), self_test_seconds=test_seconds
    )
    report = trio.run(check_up, options)
    columns = shutil.get_terminal_size().columns
    click.echo(report.model_dump_json(indent=2) if as_json else table(report, min(columns, 110)))
    sys.exit(report.exit_code)


@click.command()
@home_option
@json_option
def paths(home: Path | None, as_json: bool) -> None:
    """Print the paths of all files of this program, whether they exist or not."""
    from swarm_client.preferences.layers import preferences_path
    from swarm_shared.host.user_folders import log_folders

    place = Home.locate(home)
    found = {
        "home": place.path,
        "preferences": preferences_path(home),
        "identity": place.identity_path,
        "socket": place.socket_path,
        "runs": place.runs_path,
        "contribution": place.contribution_path,
        "data": place.path / "runs",
        "logs": place.log_folder,
    }
    found.update(("errors", folder) for folder in log_folders())
    if as_json:
        print_json({name: str(path) for name, path in found.items()})
        return
    for name, path in found.items():
        click.echo(f"{name:<12} {path}")


@click.command()
@click.argument("shell", type=click.Choice(COMPLETED_SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script for SHELL.

    bash: eval "$(swarm-client completion bash)" in ~/.bashrc; zsh likewise in ~/.zshrc; fish:
    swarm-client completion fish > ~/.config/fish/completions/swarm-client.fish
    """
    click.echo(completion_script(context.find_root().command, PROGRAM, shell))


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Print the version of this program."""
    if as_json:
        print_json({"software": SOFTWARE_VERSION})
    else:
        click.echo(SOFTWARE_VERSION)
