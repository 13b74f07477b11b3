"""`swarm-client service`: the daemon as a service that starts by itself."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from swarm_client.cli.options import home_option, json_option, print_json
from swarm_client.machine.home import Home
from swarm_client.service import launchd, systemd
from swarm_client.service.steps import RunCommand, Step, WriteFile, carry_out
from swarm_client.service.systemd import UnitPlace
from swarm_shared.base.errors import DaemonError, UsageError
from swarm_shared.base.text import printable
from swarm_shared.host.python_modules import module_command
from swarm_shared.host.user_folders import home_folder

_HIDDEN_FROM_UNITS = (Path("/home"), Path("/root"), Path("/run/user"))
"""Folders that `ProtectHome=yes` hides from the system unit."""

system_option = click.option(
    "--system",
    is_flag=True,
    help="Service of the whole machine, under a user of its own; needs root.",
)
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Print the steps without carrying them out."
)
manager_option = click.option(
    "--start/--no-start",
    default=True,
    show_default=True,
    help="--no-start writes files only: for images and chroots without a running systemd.",
)


@click.group()
def service() -> None:
    """Run the daemon as a service: from login, or with --system from boot."""


@service.command()
@system_option
@dry_run_option
@manager_option
@home_option
def install(system: bool, dry_run: bool, start: bool, home: Path | None) -> None:
    """Install the service and start it; an installed service is updated to this program."""
    steps: tuple[Step, ...]
    if sys.platform == "darwin":
        steps = _mac_install(system, home)
        after = "it starts at every login"
    else:
        place = _systemd_place(system, start)
        command = _command(system, home)
        text = systemd.unit_text(command, system=system)
        steps = systemd.install(place, text, running=start)
        if system:
            steps = (*systemd.make_system_user(_user_exists()), *steps)
        after = (
            f"join a run with `sudo -u {systemd.SYSTEM_USER} {command[0]} join INVITE "
            f"--home {systemd.SYSTEM_HOME}`"
            if system
            else "it runs while you are logged in; `loginctl enable-linger` keeps it running after "
            "that. Join a run with `swarm-client join INVITE`"
        )
    if start:
        steps = (*_stop_running_daemon(home, system), *steps)
    _do(steps, dry_run)
    if not dry_run:
        click.echo(f"installed; {after}")


@service.command()
@system_option
@dry_run_option
@manager_option
@click.option("--purge", is_flag=True, help="With --system, also remove its user and all its data.")
def uninstall(system: bool, dry_run: bool, start: bool, purge: bool) -> None:
    """Stop the service and remove it; the home is kept. Succeeds if none is installed."""
    steps: tuple[Step, ...]
    if purge and not system:
        raise UsageError(
            "--purge goes with --system; a user's own data goes with the program, by the "
            "install script's --uninstall --purge"
        )
    if sys.platform == "darwin":
        _no_system_on_mac(system)
        steps = launchd.uninstall(launchd.agent_path(home_folder()), os.getuid())
    else:
        place = _place_for(system)
        _check_root(system)
        running = start and systemd.manager_runs(place)
        steps = systemd.uninstall(place, running=running)
        if purge:
            steps = (*steps, *systemd.purge_system())
    _do(steps, dry_run)
    if not dry_run:
        click.echo("removed")


@service.command()
@system_option
@json_option
def status(system: bool, as_json: bool) -> None:
    """Show whether the service is installed, and its state."""
    found: dict[str, Any]
    if sys.platform == "darwin":
        _no_system_on_mac(system)
        path = launchd.agent_path(home_folder())
        loaded = launchd.is_loaded(os.getuid())
        found = {
            "installed": path.exists(), "enabled": path.exists(), "path": str(path),
            "state": "loaded" if loaded else "not loaded", "text": "",
        }  # fmt: skip
    else:
        place = _place_for(system)
        properties = systemd.shown(place)
        found = {
            "installed": place.unit.exists(), "enabled": place.link.is_symlink(),
            "path": str(place.unit),
            "state": properties.get("ActiveState", "unknown: systemd is not running here"),
            "text": properties.get("StatusText", ""),
        }  # fmt: skip
    if as_json:
        print_json(found)
        return
    if not found["installed"]:
        words = "swarm-client service install" + (" --system" if system else "")
        click.echo(f"not installed; `{words}` installs it")
        return
    click.echo(f"installed  {found['path']}")
    click.echo(
        f"starts     {'automatically' if found['enabled'] else 'only manually: not enabled'}"
    )
    click.echo(f"state      {found['state']}")
    if found["text"]:
        click.echo(f"status     {printable(str(found['text']))}")


def _do(steps: Sequence[Step], dry_run: bool) -> None:
    if not dry_run:
        carry_out(steps, click.echo)
        return
    for step in steps:
        click.echo(f"would {step}")
        if isinstance(step, WriteFile):
            click.echo("".join(f"    {line}\n" for line in step.content.splitlines()), nl=False)


# ---------------------------------------------------------------- Linux


def _place_for(system: bool) -> UnitPlace:
    if not sys.platform.startswith("linux"):
        raise DaemonError(
            f"services are not supported on {sys.platform}; under Windows, install inside WSL with "
            "installers/windows/install.ps1, which also creates a task that starts it"
        )
    return systemd.system_place() if system else systemd.user_place()


def _systemd_place(system: bool, start: bool) -> UnitPlace:
    place = _place_for(system)
    _check_root(system)
    if start and not systemd.manager_runs(place):
        whose = "of this machine" if system else "of your user"
        raise DaemonError(
            f"no systemd {whose} is running (containers, `su` and other init systems have none), "
            "so nothing was changed; `swarm-client join INVITE --detach` runs in the background, "
            "a line `@reboot swarm-client daemon` in `crontab -e` starts it with the machine, "
            "and --no-start writes the unit without starting it"
        )
    return place


def _check_root(system: bool) -> None:
    if system and os.geteuid() != 0:
        raise UsageError(
            "--system changes the whole machine and needs root: use sudo, or omit --system for a "
            "service of your own"
        )


def _user_exists() -> bool:
    try:
        pwd.getpwnam(systemd.SYSTEM_USER)
    except KeyError:
        return False
    return True


# ---------------------------------------------------------------- macOS


def _mac_install(system: bool, home: Path | None) -> tuple[Step, ...]:
    _no_system_on_mac(system)
    place = Home.locate(home)
    text = launchd.agent_text(_command(False, home), place.log_folder / "service.log")
    folders = (place.path, place.log_folder)
    return launchd.install(launchd.agent_path(home_folder()), text, folders, os.getuid())


def _no_system_on_mac(system: bool) -> None:
    if system:
        raise UsageError("--system needs systemd; on macOS the service is an agent of each user")


# ---------------------------------------------------------------- both


def _command(system: bool, home: Path | None) -> tuple[str, ...]:
    """The service's command: this program, with the given home."""
    script = Path(sys.executable).with_name("swarm-client")
    if system and any(script.is_relative_to(folder) for folder in _HIDDEN_FROM_UNITS):
        raise UsageError(
            f"this program is in {script.parent}, which system services cannot see; install the "
            ".deb, or install again with `--prefix /opt/swarmtrain`, and use that program"
        )
    if system and home is not None:
        raise UsageError("--system has a home of its own, /var/lib/swarmtrain; omit --home")
    words = (str(script),) if script.exists() else module_command("swarm_client")
    named = () if home is None else ("--home", str(Home.locate(home).path))
    return (*words, "daemon", *named)


def _stop_running_daemon(home: Path | None, system: bool) -> tuple[Step, ...]:
    """A background daemon holds the home: end it, so that the service can start."""
    from swarm_client.control.client import is_running

    if system:
        return ()
    place = Home.locate(home)
    if not is_running(place.socket_path):
        return ()
    command = module_command("swarm_client", "shutdown", "--home", str(place.path))
    return (RunCommand(command, may_fail=True),)
