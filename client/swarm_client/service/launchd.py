"""launchd: the agent of one macOS user, and the steps to install and remove it."""

from __future__ import annotations

import errno
import plistlib
import subprocess
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from swarm_client.service.steps import MakeFolder, Remove, RunCommand, Step, WriteFile

BUSY_CODES = (errno.EIO, 37)
"""launchctl's codes while launchd still ends the agent before: `bootout` does not wait for its end.
37 is macOS's EALREADY."""
LABEL = "org.swarmtrain.client"
SHOW_SECONDS = 10.0


def agent_path(user_folder: Path) -> Path:
    return user_folder / "Library" / "LaunchAgents" / f"{LABEL}.plist"


def agent_text(command: Sequence[str], log: Path) -> str:
    """The shipped agent, with `command` as its program and its output in `log`."""
    shipped = resources.files("swarm_client.service").joinpath(f"{LABEL}.plist").read_bytes()
    agent = plistlib.loads(shipped)
    agent["ProgramArguments"] = list(command)
    agent["StandardOutPath"] = agent["StandardErrorPath"] = str(log)
    return plistlib.dumps(agent, sort_keys=False).decode()


def install(path: Path, text: str, folders: Sequence[Path], user_id: int) -> tuple[Step, ...]:
    """Also over an installed agent: it is replaced, and the daemon restarts. `folders` are made:
    launchd makes none for a log."""
    return (
        *map(MakeFolder, folders),
        RunCommand(("launchctl", "bootout", f"gui/{user_id}/{LABEL}"), may_fail=True),
        WriteFile(path, text),
        RunCommand(("launchctl", "bootstrap", f"gui/{user_id}", str(path)), busy_codes=BUSY_CODES),
    )


def uninstall(path: Path, user_id: int) -> tuple[Step, ...]:
    return (
        RunCommand(("launchctl", "bootout", f"gui/{user_id}/{LABEL}"), may_fail=True),
        Remove(path),
    )


def is_loaded(user_id: int) -> bool:
    try:
        words = ("launchctl", "print", f"gui/{user_id}/{LABEL}")
        done = subprocess.run(words, capture_output=True, timeout=SHOW_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
