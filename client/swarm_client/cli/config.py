"""`swarm-client config`: read and change the preferences."""

from __future__ import annotations

import json
from pathlib import Path

import click

from swarm_client.cli.options import home_option as _home
from swarm_client.preferences.control import shown
from swarm_client.preferences.file import set_preference
from swarm_client.preferences.layers import Layered, check_name, load, preferences_path
from swarm_client.preferences.model import VERSION, Preferences
from swarm_shared.base.errors import UsageError
from swarm_shared.settings.commented_toml import toml_value

ALL_GPUS = -1
"""A number that no GPU has: the values for all GPUs apply to it."""


@click.group()
def config() -> None:
    """Read and change what this machine lends, and when."""


@config.command("get")
@click.argument("name", required=False)
@_home
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def get(name: str | None, home: Path | None, as_json: bool) -> None:
    """Show every effective preference and its source, or only the value of NAME."""
    path = preferences_path(home)
    layered = load(path)
    if name is None:
        click.echo(json.dumps(shown(path, ()), indent=2) if as_json else _table(path, layered))
        return
    check_name(name, "swarm-client config get")
    value = _value_of(layered.preferences, name)
    if as_json:
        origin = layered.origin(name)
        document = {"name": name, "value": value, "layer": origin.layer, "where": origin.where}
        click.echo(json.dumps({"version": VERSION, **document}, indent=2))
    else:
        click.echo(value if isinstance(value, str) else toml_value(value))


@config.command("set")
@click.argument("name")
@click.argument("value", required=False)
@click.option(
    "--default",
    "reset",
    is_flag=True,
    help="Remove NAME from the file, so that its default applies.",
)
@_home
def set_(name: str, value: str | None, reset: bool, home: Path | None) -> None:
    """Set the preference NAME to VALUE in the file; a running client applies it."""
    if (value is None) != reset:
        raise UsageError("give either a VALUE or --default")
    path = preferences_path(home)
    understood = set_preference(path, name, value)
    now = "its default" if reset else toml_value(understood)
    click.echo(f"{name} is {now} now, in {path}", err=True)
    origin = load(path).origin(name)
    if origin.layer == "environment":
        click.echo(f"note: {origin.where} in the environment overrides the file", err=True)


@config.command()
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@_home
def validate(file: Path | None, home: Path | None) -> None:
    """Check the preferences in FILE (default: the file in use) without changing anything."""
    path = file or preferences_path(home)
    load(path, {} if file is not None else None)
    found = "is valid" if path.exists() else "does not exist, so the defaults apply"
    click.echo(f"{path} {found}", err=True)


@config.command()
def schema() -> None:
    """Print the JSON schema of the preferences, for editors."""
    document = Preferences.model_json_schema()
    document["properties"]["version"] = {"const": VERSION}
    click.echo(json.dumps(document, indent=2))


def _value_of(preferences: Preferences, name: str) -> object:
    """The effective value, also for a GPU or a day without values of its own."""
    head, *rest = name.split(".")
    if head == "gpu":
        which, key = rest
        known = preferences.for_gpu(int(which) if which.isdecimal() else ALL_GPUS)
        return getattr(known, key)
    if rest:
        days: dict[str, str] = getattr(preferences, head)
        return days.get(rest[0], getattr(preferences, head.removesuffix("_on")))
    return getattr(preferences, head)


def _table(path: Path, layered: Layered) -> str:
    rows = [(name, toml_value(value), origin.where) for name, value, origin in layered.values()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{name:<{widths[0]}}  {value:<{widths[1]}}  {where}" for name, value, where in rows]
    there = "" if path.exists() else " (does not exist yet; `swarm-client config set` creates it)"
    return "\n".join([f"file: {path}{there}", "", *lines])
