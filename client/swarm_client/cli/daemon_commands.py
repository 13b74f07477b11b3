"""Commands that ask a running daemon: status, pause, resume, finish, leave, shutdown, runs, logs.

They import neither trio nor libp2p nor torch.
"""

from __future__ import annotations

import datetime
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarm_client.cli.options import (
    home_option,
    json_option,
    parse_duration,
    print_answer,
    print_json,
    socket_of,
)
from swarm_client.machine.home import Home
from swarm_shared.base.text import printable

if TYPE_CHECKING:
    from swarm_client.control.status_document import LogLine

SHOWN_LINES = 200


@click.command()
@home_option
@json_option
def status(home: Path | None, as_json: bool) -> None:
    """Show what the daemon does, or why it computes nothing."""
    from swarm_client.cli.text import status_text
    from swarm_client.control.client import ask
    from swarm_client.control.status_document import Status
    from swarm_shared import SOFTWARE_VERSION

    document = ask(socket_of(home), "status")
    if document.get("software") != SOFTWARE_VERSION:
        click.echo(
            f"swarm-client: the daemon is version {document.get('software')} and this command "
            f"{SOFTWARE_VERSION}; end it with `swarm-client shutdown` and start it again",
            err=True,
        )
    if as_json:
        print_json(document)
    else:
        click.echo(status_text(Status.model_validate(document)))


@click.command()
@click.option("--for", "time", metavar="TIME", help="Resume automatically after 30m, 2h, 1d, …")
@home_option
@json_option
def pause(time: str | None, home: Path | None, as_json: bool) -> None:
    """Stop computing; work that was counted is kept."""
    seconds = None if time is None else parse_duration(time)
    _order(home, as_json, "pause", seconds=seconds)


@click.command()
@home_option
@json_option
def resume(home: Path | None, as_json: bool) -> None:
    """Resume after `pause` or `finish`."""
    _order(home, as_json, "resume")


def _order(home: Path | None, as_json: bool, method: str, **arguments: object) -> None:
    from swarm_client.control.client import ask

    print_answer(ask(socket_of(home), method, **arguments), as_json)


def _end(method: str, no_wait: bool, home: Path | None, as_json: bool) -> None:
    from swarm_client.control.client import NoDaemon, ask, stream

    answer = ask(socket_of(home), method)
    if not as_json:
        print_answer(answer, as_json)
    if not no_wait:
        try:
            for document in stream(socket_of(home), "follow"):
                # A daemon in the foreground ends with its run, and so does this stream.
                if method != "shutdown" and document.get("state") == "stopped":
                    break
        except NoDaemon:
            pass
        if not as_json:
            click.echo("done")
    if as_json:
        print_answer({**answer, "done": not no_wait}, as_json)


def _ending(method: str, before: str, text: str) -> click.Command:
    """A command that ends something, and by default waits for its end."""

    @click.command(method, help=text)
    @click.option("--no-wait", is_flag=True, help=f"Return at once, before {before}.")
    @home_option
    @json_option
    def command(no_wait: bool, home: Path | None, as_json: bool) -> None:
        _end(method, no_wait, home, as_json)

    return command


finish = _ending(
    "finish", "the work is complete",
    "Complete work in flight, hand the stage over and stop; `resume` continues the run.",
)  # fmt: skip
leave = _ending(
    "leave", "the work is complete",
    "Finish and leave the run: the daemon does not rejoin it automatically.",
)  # fmt: skip
shutdown = _ending(
    "shutdown", "the daemon has exited",
    "Stop the daemon in order; the next daemon continues the run.",
)  # fmt: skip


@click.group(invoke_without_command=True)
@home_option
@json_option
@click.pass_context
def runs(context: click.Context, home: Path | None, as_json: bool) -> None:
    """List and choose among the runs stored on this machine; the daemon runs the chosen one."""
    context.obj = home
    if context.invoked_subcommand is None:
        _list(home, as_json)


@runs.command("list")
@home_option
@json_option
@click.pass_obj
def list_runs(before: Path | None, home: Path | None, as_json: bool) -> None:
    """List each stored run with its ID and flag the chosen one; needs no daemon."""
    _list(home or before, as_json)


@runs.command()
@click.argument("run")
@home_option
@json_option
@click.pass_obj
def choose(before: Path | None, run: str, home: Path | None, as_json: bool) -> None:
    """Choose RUN (its name or a prefix of its ID)."""
    _order(home or before, as_json, "choose_run", run=run)


@runs.command()
@click.argument("run")
@home_option
@json_option
@click.pass_obj
def forget(before: Path | None, run: str, home: Path | None, as_json: bool) -> None:
    """Remove RUN and its invite from this machine."""
    _order(home or before, as_json, "forget_run", run=run)


def _list(home: Path | None, as_json: bool) -> None:
    from swarm_client.control.known_runs import read

    known = [run.model_dump() for run in read(Home.locate(home).runs_path).listed()]
    if as_json:
        print_json({"runs": known})
    for run in () if as_json else known:
        joined = datetime.datetime.fromtimestamp(run["joined_at"]).strftime("%Y-%m-%d")
        mark = "*" if run["chosen"] else " "
        click.echo(printable(f"{mark} {run['id'][:12]}  joined {joined}  {run['name']}"))
    if not known and not as_json:
        click.echo("no run has been joined yet; `swarm-client join INVITE` joins one", err=True)


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Print new lines as they come, until Ctrl-C.")
@click.option("--events", is_flag=True, help="Print only the lines that `join` prints.")
@home_option
@json_option
def logs(follow: bool, events: bool, home: Path | None, as_json: bool) -> None:
    """Print the daemon's newest log lines; without a daemon, the end of its last log file.

    With --json, each line is one object.
    """
    from swarm_client.control.client import NoDaemon, log_lines, stream
    from swarm_client.control.status_document import LogLine

    def show(lines: list[dict[str, Any]]) -> None:
        for line in map(LogLine.model_validate, lines):
            if not events or line.level == "event":
                _show_line(line, as_json)

    try:
        if not follow:
            show(list(log_lines(socket_of(home))))
        for answer in stream(socket_of(home), "log", follow=True) if follow else ():
            show(answer["lines"])
    except NoDaemon:
        path = Home.locate(home).log_folder / "client.log"
        if follow or as_json or not _show_file(path):
            raise


def _show_line(line: LogLine, as_json: bool) -> None:
    if as_json:
        import json

        from swarm_client.cli.options import JSON_VERSION

        click.echo(json.dumps({"version": JSON_VERSION, **line.model_dump()}))
        return
    when = datetime.datetime.fromtimestamp(line.time).strftime("%H:%M:%S")
    level = "" if line.level == "event" else f"{line.level}: "
    click.echo(f"{when}  {level}{printable(line.text)}")


def _show_file(path: Path) -> bool:
    """Show the end of a log; False if there is no such file."""
    from swarm_client.control.stored_file import unreadable

    try:
        with path.open(errors="replace") as file:
            last = deque(file, maxlen=SHOWN_LINES)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise unreadable(path, error) from error
    click.echo(f"no daemon is running here; this is the end of {path}", err=True)
    for line in last:
        click.echo(printable(line.rstrip("\n")))
    return True
