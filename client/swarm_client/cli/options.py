"""What commands share: the home, JSON output for programs, and formatting for people."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from swarm_client.machine.home import Home
from swarm_shared.base.errors import UsageError
from swarm_shared.base.text import printable

JSON_VERSION = 1
"""Version of every JSON document that a command prints; within a version fields are only added."""

_F = TypeVar("_F", bound=Callable[..., Any])
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

home_option = click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="SWARM_CLIENT_HOME",
    help="Folder of identity, caches and logs.",
)
_INVITE_CHARACTERS = 10_000
"""Longest invite that is read from standard input; the longest possible one has 8192."""


def _invite_or_input(
    context: click.Context, parameter: click.Parameter, invite: str | None
) -> str | None:
    """Return the invite; for `-` the one on standard input, because arguments are visible to all
    users of the machine and an invite may hold a token."""
    if invite != "-":
        return invite
    if sys.stdin.isatty():
        return sys.stdin.readline(_INVITE_CHARACTERS)
    return sys.stdin.read(_INVITE_CHARACTERS)


def invite_argument(*, required: bool) -> Callable[[_F], _F]:
    return click.argument("invite", required=required, callback=_invite_or_input)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def socket_of(home: Path | None) -> Path:
    return Home.locate(home).socket_path


def print_json(document: dict[str, Any]) -> None:
    click.echo(json.dumps({"version": JSON_VERSION, **document}, indent=2))


def print_answer(document: dict[str, Any], as_json: bool) -> None:
    """Print the daemon's answer."""
    if as_json:
        print_json(document)
    else:
        click.echo(printable(str(document["message"])))


def parse_duration(text: str) -> float:
    """Seconds of a duration like 90s, 30m, 2h, 1h30m, 1d. UsageError for anything else."""
    found = re.fullmatch(r"(?:\d+[smhd])+", text.strip())
    seconds = sum(int(n) * _UNITS[u] for n, u in re.findall(r"(\d+)([smhd])", text))
    if found is None or not 0 < seconds <= 366 * 86400:
        raise UsageError(f"{text!r} is not a duration; write 30m, 2h or 1h30m, at most 366d")
    return float(seconds)
