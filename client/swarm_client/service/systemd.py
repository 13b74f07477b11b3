"""systemd: a user's or the machine's unit, and the steps to install and remove it.

A unit is enabled by the link that `systemctl enable` would create: so installing works, and
`--dry-run` shows it, where no manager is running yet (an image being built, a chroot). Commands are
sent to the manager only where one is running.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from swarm_client.service.steps import MakeLink, Remove, RunCommand, Step, WriteFile
from swarm_shared.host.user_folders import home_folder

UNIT = "swarm-client.service"
SYSTEM_USER = "swarmtrain"
SYSTEM_HOME = Path("/var/lib/swarmtrain")
"""The unit's StateDirectory."""
SHOW_SECONDS = 10.0
PLAIN_PATH = re.compile(r"[^'\"\\\\$]*")


@dataclass(frozen=True, slots=True)
class UnitPlace:
    """Where one manager's units are, and its command."""

    folder: Path
    target: str
    systemctl: tuple[str, ...]

    @property
    def unit(self) -> Path:
        return self.folder / UNIT

    @property
    def link(self) -> Path:
        return self.folder / f"{self.target}.wants" / UNIT


def user_place() -> UnitPlace:
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home_folder() / ".config").absolute()
    return UnitPlace(config / "systemd" / "user", "default.target", ("systemctl", "--user"))


def system_place() -> UnitPlace:
    return UnitPlace(Path("/etc/systemd/system"), "multi-user.target", ("systemctl",))


def unit_text(command: Sequence[str], *, system: bool) -> str:
    """The shipped unit, with `command` as its program."""
    name = "swarm-client-system.service" if system else UNIT
    shipped = resources.files("swarm_client.service").joinpath(name).read_text()
    if not PLAIN_PATH.fullmatch(command[0]):
        # A unit's first word may contain no quotes and no $$; all further words may.
        command = ("/usr/bin/env", *command)
    begin = f"ExecStart={' '.join(map(quote_word, command))}"
    lines = [begin if line.startswith("ExecStart=") else line for line in shipped.splitlines()]
    return "\n".join(lines) + "\n"


def quote_word(word: str) -> str:
    """A word in a unit's command line, where systemd expands %, $ and backslashes."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def install(place: UnitPlace, text: str, *, running: bool) -> tuple[Step, ...]:
    """Also over an installed unit: it is replaced, and the daemon restarts."""
    files: tuple[Step, ...] = (WriteFile(place.unit, text), MakeLink(place.link, place.unit))
    if not running:
        return files
    return (
        *files,
        RunCommand((*place.systemctl, "daemon-reload")),
        RunCommand((*place.systemctl, "restart", UNIT)),
    )


def make_system_user(exists: bool) -> tuple[Step, ...]:
    if exists:
        return ()
    words = ("useradd", "--system", "--user-group", "--no-create-home")
    home = ("--home-dir", str(SYSTEM_HOME), "--shell", "/usr/sbin/nologin")
    return (RunCommand((*words, *home, SYSTEM_USER)),)


def uninstall(place: UnitPlace, *, running: bool) -> tuple[Step, ...]:
    files: tuple[Step, ...] = (Remove(place.link), Remove(place.unit))
    if not running:
        return files
    return (
        RunCommand((*place.systemctl, "stop", UNIT), may_fail=True),
        *files,
        RunCommand((*place.systemctl, "daemon-reload")),
        # A past failure is forgotten with the unit.
        RunCommand((*place.systemctl, "reset-failed", UNIT), may_fail=True),
    )


def purge_system() -> tuple[Step, ...]:
    return (Remove(SYSTEM_HOME, whole=True), RunCommand(("userdel", SYSTEM_USER), may_fail=True))


def manager_runs(place: UnitPlace) -> bool:
    """Whether the manager answers: `is-system-running` then prints a state, whichever it is."""
    output = _ask((*place.systemctl, "is-system-running"))
    return output.strip() not in ("", "offline", "unknown")


def shown(place: UnitPlace) -> Mapping[str, str]:
    """The manager's properties of the unit; empty where it does not answer."""
    names = ("LoadState", "ActiveState", "SubState", "MainPID", "StatusText")
    output = _ask((*place.systemctl, "show", UNIT, *(f"--property={name}" for name in names)))
    return dict(line.split("=", 1) for line in output.splitlines() if "=" in line)


def _ask(words: Sequence[str]) -> str:
    try:
        return subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=SHOW_SECONDS, check=False,
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
