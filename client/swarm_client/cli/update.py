"""`swarm-client update`: the upgrade of this installation, by the tool that installed it.

Only this command upgrades, and only when a user runs it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click

from swarm_client.cli.options import home_option
from swarm_client.machine.home import Home
from swarm_client.service import launchd, systemd
from swarm_client.service.installation import Upgrade, find_upgrade
from swarm_client.service.steps import RunCommand, carry_out
from swarm_shared.base.errors import ConfigurationError, DaemonError
from swarm_shared.host.user_folders import home_folder


@click.command()
@home_option
@click.option("--dry-run", is_flag=True, help="Print the command without running it.")
def update(home: Path | None, dry_run: bool) -> None:
    """Upgrade this program, in the way in which it was installed.

    It runs `uv tool upgrade`, `pipx upgrade` or the install script again, whichever installed it,
    and downloads nothing by itself. A Debian package, a source checkout or pip need a step of
    yours, which it names. A service of yours that runs this program is restarted afterwards.
    """
    upgrade = _upgrade_of_this()
    if not upgrade.command:
        raise ConfigurationError(f"this program was installed by {upgrade.installed_by}: "
                                 f"{upgrade.by_hand}")  # fmt: skip
    click.echo(f"installed by {upgrade.installed_by}")
    if dry_run:
        click.echo(f"would run {shlex.join(upgrade.command)}")
        return
    # Read before the files of this program are replaced.
    restart = () if upgrade.restarts else _service_restart()
    runs = not upgrade.restarts and not restart and _daemon_runs(home)
    _run(upgrade)
    carry_out(restart, click.echo)
    if runs:
        click.echo(
            "the client that runs is the old program still: `swarm-client shutdown` ends it in "
            "order, `swarm-client daemon --detach` starts the new one"
        )


def _upgrade_of_this() -> Upgrade:
    distribution = importlib.metadata.distribution("swarmtrain")
    return find_upgrade(
        Path(sys.prefix),
        distribution.read_text("direct_url.json"),
        os.environ,
        organiser=importlib.util.find_spec("fastapi") is not None,
    )


def _run(upgrade: Upgrade) -> None:
    program, *rest = upgrade.command
    found = shutil.which(program)
    if found is None:
        raise ConfigurationError(
            f"{program} installed this program and is not on your PATH; run "
            f"`{shlex.join(upgrade.command)}` where it is"
        )
    # Its output is the user's: it says from which version to which.
    done = subprocess.run([found, *rest], stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise DaemonError(
            f"`{shlex.join(upgrade.command)}` failed with exit code {done.returncode}; its "
            "message above says why"
        )


def _service_restart() -> tuple[RunCommand, ...]:
    """The restart of this user's service, where it is active and runs this very program."""
    program = str(Path(sys.executable).with_name("swarm-client"))
    if sys.platform == "darwin":
        path = launchd.agent_path(home_folder())
        ours = path.exists() and program in path.read_text() and launchd.is_loaded(os.getuid())
        words = ("launchctl", "kickstart", "-k", f"gui/{os.getuid()}/{launchd.LABEL}")
        return (RunCommand(words),) if ours else ()
    place = systemd.user_place()
    if not place.unit.exists() or systemd.quote_word(program) not in place.unit.read_text():
        return ()
    if systemd.shown(place).get("ActiveState") != "active":
        return ()
    return (RunCommand((*place.systemctl, "restart", systemd.UNIT)),)


def _daemon_runs(home: Path | None) -> bool:
    from swarm_client.control.client import is_running

    return is_running(Home.locate(home).socket_path)
