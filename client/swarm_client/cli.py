"""`swarm-client`: the volunteer's command line. Words in, one clear line per event out."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import shutil
import sys
import traceback
from pathlib import Path

import click
import platformdirs
import trio

from swarm_client.commands_ledger import verify_ledger_command
from swarm_shared.errors import SwarmError
from swarm_shared.messages import SOFTWARE_VERSION

INTERRUPTED = 130
"""Shell convention: 128 + SIGINT."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(SOFTWARE_VERSION, prog_name="swarm-client")
def swarm_client() -> None:
    """Lend this computer to the training of a large model."""


@swarm_client.command()
@click.argument("invite")
@click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for identity, caches and logs.",
)
@click.option("--device", default="auto", show_default=True, help="cpu, cuda:0, … or auto.")
@click.option("--stage", type=click.IntRange(min=0), help="Hold this stage, not the neediest.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Compute threads on a CPU. [default: all cores but one]",
)
@click.option("--name", help="A public name for the contributions; none by default.")
@click.option("--team", help="A team for whom the contributions count as well; none by default.")
@click.option(
    "--listen",
    default="/ip4/0.0.0.0/tcp/0",
    show_default=True,
    help="Address to listen on, as a multiaddr.",
)
@click.option("--memory-gib", type=click.FloatRange(min=0, min_open=True), help="Memory to offer.")
@click.option(
    "--relay/--no-relay",
    default=True,
    show_default=True,
    help="Carry traffic of members that cannot be reached, when this machine can be.",
)
def join(
    invite: str,
    home: Path | None,
    device: str,
    stage: int | None,
    threads: int | None,
    name: str | None,
    team: str | None,
    listen: str,
    memory_gib: float | None,
    relay: bool,
) -> None:
    """Take part in the run that INVITE names, in the foreground; Ctrl-C leaves cleanly."""
    from swarm_client import faults
    from swarm_client.daemon import JoinOptions
    from swarm_client.daemon import join as run

    injector = faults.activate(name or "", daemon_pid=os.getpid())
    if injector is not None:
        from swarm_client.fault_network import install

        injector.drop_network = install().begin
        say("FAULT INJECTION IS ON: this volunteer will fail on purpose")
    options = JoinOptions(
        invite=invite,
        home=home,
        device=device,
        stage=stage,
        threads=threads or max(1, (os.cpu_count() or 2) - 1),
        name=name,
        team=team,
        listen=listen,
        memory_bytes=int(memory_gib * 2**30) if memory_gib is not None else None,
        may_relay=relay,
    )
    trio.run(run, options, say)


@swarm_client.command()
@click.argument("invite", required=False)
@click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for identity, caches and logs.",
)
@click.option("--device", default="auto", show_default=True, help="cpu, cuda:0, … or auto.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
def doctor(invite: str | None, home: Path | None, device: str, as_json: bool) -> None:
    """Check this machine, and the way to the run that INVITE names, in half a minute.

    Nothing is downloaded, and nothing in the home is changed. The exit code is 0 when nothing is
    a problem (warnings are none), otherwise that of the first problem.
    """
    from swarm_client.doctor.checkup import DoctorOptions, check_up, seconds_left
    from swarm_client.doctor.report import table

    # What is worth a person's time is in the table.
    for name in ("swarm_client", "swarm_shared"):
        logging.getLogger(name).addHandler(logging.NullHandler())
        logging.getLogger(name).propagate = False
    if sys.stderr.isatty():
        click.echo("checking this machine; this takes half a minute at most …", err=True)
    options = DoctorOptions(invite, home, device, total_seconds=seconds_left())
    report = trio.run(check_up, options)
    columns = shutil.get_terminal_size().columns
    click.echo(report.model_dump_json(indent=2) if as_json else table(report, min(columns, 110)))
    sys.exit(report.exit_code)


swarm_client.add_command(verify_ledger_command)


def say(text: str) -> None:
    """One event, one line, with the time of day.

    Often into a file: a full disk, or a terminal that is gone, is no reason to stop lending.
    """
    now = datetime.datetime.now().strftime("%H:%M:%S")
    with contextlib.suppress(OSError):
        click.echo(f"{now}  {text}")


def main() -> None:
    """Entry point: every expected error is one sentence and its exit code, never a traceback."""
    try:
        swarm_client.main(standalone_mode=False)
    except click.exceptions.Exit as request:
        sys.exit(request.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except BaseExceptionGroup as group:
        _fail(group)
    except Exception as error:  # noqa: BLE001  the outermost supervisor: logged in full, told in a sentence
        _fail(error)


def _fail(error: BaseException) -> None:
    expected = _expected(error)
    if expected is not None:
        click.echo(f"swarm-client: error: {expected}", err=True)
        sys.exit(expected.exit_code)
    if _interrupted(error):
        sys.exit(INTERRUPTED)
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


def _expected(error: BaseException) -> SwarmError | None:
    """The one error to tell, also out of a group of simultaneous ones."""
    if isinstance(error, SwarmError):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [_expected(one) for one in error.exceptions]
        return found[0] if found and all(one is not None for one in found) else None
    return None


def _interrupted(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_interrupted(one) for one in error.exceptions)
    return isinstance(error, KeyboardInterrupt)


if __name__ == "__main__":
    main()
