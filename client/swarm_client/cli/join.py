"""Commands that start a daemon, in the foreground or in the background: join, daemon."""

from __future__ import annotations

import os
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm_client.cli.options import home_option, invite_argument
from swarm_client.machine.device_names import FORMS
from swarm_client.machine.home import Home
from swarm_shared.base.command_line import print_event
from swarm_shared.base.errors import DaemonError, SwarmError, UsageError
from swarm_shared.base.text import printable
from swarm_shared.host.python_modules import module_command

if TYPE_CHECKING:
    from swarm_client.control.messages import JoinArguments

START_SECONDS = 60.0
"""Timeout of a daemon's start; imports are slow on a busy machine."""

ADMISSION_SECONDS = 60.0
"""Seconds to wait for the admission; a coordinator that is running answers sooner."""

POLL_SECONDS = 0.05
FRESH_LOG_BYTES = 5 * 2**20
"""Size of a background daemon's log above which a new log is begun."""


@click.command()
@invite_argument(required=True)
@home_option
@click.option(
    "--device", "devices", multiple=True, metavar="DEVICE",
    help=f"Device that holds a stage: {FORMS} (every GPU, else the processor); may be repeated.  "
    "[default: auto]",
)  # fmt: skip
@click.option(
    "--stage",
    type=click.IntRange(min=0),
    help="Hold this stage instead of the assigned one; one device only.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Compute threads on a CPU.  [default: all cores but one]",
)
@click.option("--name", help="Public name for the contributions; none by default.")
@click.option("--team", help="Team that the contributions also count for; none by default.")
@click.option(
    "--listen",
    default="/ip4/0.0.0.0/tcp/0",
    show_default=True,
    help="Multiaddr to listen on.",
)
@click.option(
    "--memory-gib",
    type=click.FloatRange(min=0, min_open=True),
    help="Memory offered per device, in GiB.",
)
@click.option(
    "--relay/--no-relay",
    default=True,
    show_default=True,
    help="Relay traffic of members that cannot be dialled, if this machine can be.",
)
@click.option(
    "--set",
    "preferences",
    multiple=True,
    metavar="NAME=VALUE",
    help="Preference that overrides the file for this run; see `swarm-client config`.",
)
@click.option("--detach", is_flag=True, help="Start a background daemon and return.")
def join(
    invite: str,
    home: Path | None,
    devices: tuple[str, ...],
    stage: int | None,
    threads: int | None,
    name: str | None,
    team: str | None,
    listen: str,
    memory_gib: float | None,
    relay: bool,
    preferences: tuple[str, ...],
    detach: bool,
) -> None:
    """Join the run that INVITE names; Ctrl-C leaves cleanly.

    With - as INVITE it is read from standard input, where no other user of this machine sees it.

    If a daemon already runs in this home, it joins the run and this command returns.
    """
    from pydantic import ValidationError

    from swarm_client.control.client import is_running
    from swarm_client.control.messages import JoinArguments
    from swarm_client.preferences.layers import load, preferences_path
    from swarm_shared.base.json_messages import first_error
    from swarm_shared.identity.invite import Invite

    Invite.decode(invite)
    load(preferences_path(home), flags=preferences)
    try:
        arguments = JoinArguments(
            invite=invite, device=",".join(devices) or "auto", stage=stage, threads=threads,
            name=name, team=team, listen=listen,
            memory_bytes=int(memory_gib * 2**30) if memory_gib is not None else None,
            may_relay=relay, preferences=preferences,
        )  # fmt: skip
    except ValidationError as error:
        raise UsageError(f"these options are not possible: {first_error(error)}") from error
    place = Home.create(home)
    if is_running(place.socket_path):
        join_through_daemon(place, arguments)
    elif detach:
        _start_detached(place, idle=True)
        try:
            joined = join_through_daemon(place, arguments)
        except SwarmError:
            _shut_down(place)
            raise
        if not joined:
            _shut_down(place)
    else:
        _in_foreground(home, arguments)


def _in_foreground(home: Path | None, arguments: JoinArguments) -> None:
    import trio

    from swarm_client.daemon.daemon import run_daemon
    from swarm_client.fault_injection import faults

    _keep_files_private()
    injector = faults.activate(arguments.name or "", daemon_pid=os.getpid())
    if injector is not None:
        from swarm_client.fault_injection.network_outage import install

        injector.drop_network = install().begin
        print_event("FAULT INJECTION IS ON: this volunteer will fail on purpose")
    trio.run(run_daemon, home, print_event, arguments)


def _keep_files_private() -> None:
    """As in a service, whose unit says so: a home folder that was there before may be open to
    others, and logs and states need not be."""
    os.umask(0o077)


@click.command()
@home_option
@click.option("--idle", is_flag=True, help="Do not continue the chosen run.")
@click.option("--detach", is_flag=True, help="Start it in the background and return.")
def daemon(home: Path | None, idle: bool, detach: bool) -> None:
    """Run without an invite and continue the chosen run; for services. SIGTERM stops it."""
    if detach:
        from swarm_client.control.client import is_running

        place = Home.locate(home)
        if is_running(place.socket_path):
            raise DaemonError(
                f"a daemon already runs in {place.path}; `swarm-client status` shows it"
            )
        _start_detached(place, idle=idle)
        return
    import trio

    from swarm_client.daemon.daemon import run_daemon
    from swarm_client.machine.sd_notify import Notifier

    _keep_files_private()
    notifier = Notifier.from_environment(os.environ)
    trio.run(partial(run_daemon, home, print_event, resume=not idle, notifier=notifier))


def join_through_daemon(place: Home, arguments: JoinArguments) -> bool:
    """Have a running daemon join, and report until it is attached or has failed; False if the run
    has finished."""
    from swarm_client.control.client import ask, log_lines, stream
    from swarm_client.control.messages import ErrorReport, error_from_report
    from swarm_client.control.status_document import LogLine, Status, SuspendReason
    from swarm_shared.identity.invite import Invite

    run = str(Invite.decode(arguments.invite).run_id)
    socket_path = place.socket_path
    seen = max((line["number"] for line in log_lines(socket_path)), default=0)
    click.echo(printable(ask(socket_path, "join", **arguments.model_dump())["message"]))
    deadline = time.monotonic() + ADMISSION_SECONDS
    for document in stream(socket_path, "follow"):
        if problem := ask(socket_path, "failure")["problem"]:
            raise error_from_report(ErrorReport.model_validate(problem))
        for line in map(LogLine.model_validate, log_lines(socket_path, seen)):
            seen = line.number
            if line.level == "event":
                click.echo(f"  {printable(line.text)}")
        status = Status.model_validate(document)
        if status.run is not None and status.run.id == run and status.run.coordinator_attached:
            click.echo(f"{status.state.value}; `swarm-client status` shows the progress")
            return True
        if status.reason is SuspendReason.RUN_FINISHED:
            return False
        if time.monotonic() > deadline:
            click.echo("the run has not answered yet; the daemon keeps trying", err=True)
            return True
    raise DaemonError(f"the daemon has ended; its log is in {place.log_folder}")


def _start_detached(place: Home, *, idle: bool) -> None:
    """Start a daemon in a session of its own and wait until it answers.

    SwarmError with its own error message and exit code when it ends before that.
    """
    from swarm_client.control.client import is_running
    from swarm_client.control.messages import error_with_exit_code

    Home.create(place.path)
    _keep_files_private()
    log_path = place.log_folder / "daemon.log"
    words = ("--idle",) if idle else ()
    try:
        fresh = not log_path.exists() or log_path.stat().st_size > FRESH_LOG_BYTES
        with log_path.open("wb" if fresh else "ab") as log:
            began_at = log.tell()
            process = subprocess.Popen(
                module_command("swarm_client", "daemon", *words, "--home", str(place.path)),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        raise DaemonError(
            f"no daemon could be started with its log in {log_path}: {error}"
        ) from error
    deadline = time.monotonic() + START_SECONDS
    while not is_running(place.socket_path):
        code = process.poll()
        if code is not None:
            raise error_with_exit_code(code, _last_error(log_path, began_at))
        if time.monotonic() > deadline:
            process.terminate()
            raise DaemonError(f"the daemon did not answer in time; its log is {log_path}")
        time.sleep(POLL_SECONDS)


def _last_error(log_path: Path, began_at: int) -> str:
    with log_path.open("rb") as log:
        log.seek(began_at)
        lines = log.read(64 * 1024).decode(errors="replace").splitlines()
    marker = "swarm-client: error: "
    errors = [line.removeprefix(marker) for line in lines if line.startswith(marker)]
    return errors[-1] if errors else f"the daemon ended at once; its log is {log_path}"


def _shut_down(place: Home) -> None:
    """Shut down a daemon that was started for a run that has finished or does not admit this
    peer."""
    from swarm_client.control.client import ask

    try:
        ask(place.socket_path, "shutdown")
    except DaemonError:
        return  # it has ended already
