"""How this program was installed, and the command that upgrades it in the same way.

Each installer leaves a file of its own in the environment, or is known by the environment's place.
Nothing is downloaded here, and nothing but the tool that installed the program is run: only that
tool knows where the program came from.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

DEB_PREFIX = Path("/usr/lib/swarmtrain")
"""Environment of the Debian package."""
SCRIPT_FOLDER = "swarmtrain-program"
"""Name of the environment that installers/linux/install.sh makes."""
SCRIPT = Path("installers") / "linux" / "install.sh"


@dataclass(frozen=True, slots=True)
class Upgrade:
    """How one installation is upgraded: by `command`, or where that is empty by the user."""

    installed_by: str
    command: tuple[str, ...] = ()
    by_hand: str = ""
    """What the user does, as the end of a sentence."""
    restarts: bool = False
    """Whether the command itself stops and starts a running client."""


def find_upgrade(
    prefix: Path, origin: str | None, environment: Mapping[str, str], *, organiser: bool
) -> Upgrade:
    """Return how the installation in `prefix` (`sys.prefix`) is upgraded.

    `origin` is the content of its direct_url.json (PEP 610), None without one; `organiser` says
    whether the packages of the extra `coordinator` are there.
    """
    source, editable = _source_of(origin)
    if editable:
        return Upgrade(
            "a source checkout",
            by_hand=f"run `git pull` and `make setup` in {source or 'the checkout'}",
        )
    if prefix == DEB_PREFIX:
        return Upgrade(
            "a Debian package",
            by_hand="get the newer package from where this one came from, then run "
            "`sudo apt-get install ./swarmtrain_VERSION.deb`",
        )
    if (prefix / "uv-receipt.toml").is_file():
        return Upgrade("uv", ("uv", "tool", "upgrade", "swarmtrain"))
    if (prefix / "pipx_metadata.json").is_file():
        return Upgrade("pipx", ("pipx", "upgrade", "swarmtrain"))
    if prefix.name == SCRIPT_FOLDER:
        return _by_script(prefix, source, environment, organiser)
    return Upgrade(
        f"pip, in {prefix}",
        by_hand="install the newer version there as this one was; an index may have another "
        "project's package, so nothing is fetched from one by its name",
    )


def _source_of(origin: str | None) -> tuple[Path | None, bool]:
    """The local folder that was installed, if it was one, and whether it is used in place."""
    if origin is None:
        return None, False
    found = json.loads(origin)
    if "dir_info" not in found:
        return None, False
    return Path(unquote(urlsplit(found["url"]).path)), bool(found["dir_info"].get("editable"))


def _may_be_anothers(folder: Path) -> bool:
    """Whether another user of the machine has made it, or a folder on the way to it, in one that is
    open to all: the checkout of the installation is gone from /tmp then, and this is not it."""
    return any(
        outer.stat().st_mode & stat.S_IWOTH and inner.lstat().st_uid not in (0, os.geteuid())
        for inner, outer in pairwise((folder, *folder.parents))
    )


def _by_script(
    prefix: Path, source: Path | None, environment: Mapping[str, str], organiser: bool
) -> Upgrade:
    if source is None or not (source / SCRIPT).is_file() or _may_be_anothers(source):
        return Upgrade(
            "install.sh",
            by_hand="run install.sh again, with the newer wheel after --from and the other "
            "options that you gave it",
        )
    words = ["sh", str(source / SCRIPT)]
    data = environment.get("XDG_DATA_HOME") or str(Path(environment["HOME"]) / ".local" / "share")
    if prefix.parent != Path(data):
        words += ["--prefix", str(prefix.parents[1])]
    if organiser:
        words.append("--coordinator")
    return Upgrade(f"install.sh, from {source}", tuple(words), restarts=True)
