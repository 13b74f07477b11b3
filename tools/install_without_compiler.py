"""Installs the project where nothing can be compiled. `tools/setup.sh` runs it, from .venv.

libp2p 0.8.1 asks for exactly fastecdsa 2.3.2, which exists as source only and needs a C compiler,
gmp's and Python's headers. Later fastecdsa releases are there ready-made. libp2p uses them for
P-256 keys alone; ours are Ed25519, so all that has to work is the import, and it does. pip has no
way to overrule a package's own pin, so everything is installed by name here and libp2p without
its dependencies. Everywhere else the ordinary installation is taken.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

READY_MADE = "fastecdsa>=4,<5"


def main() -> None:
    extras = sys.argv[1:]
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    wanted: list[str] = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    libp2p = [line for line in wanted if name_of(line) == "libp2p"]
    pip("--no-deps", *libp2p)
    others = [line for line in wanted if name_of(line) != "libp2p"]
    others += [
        line
        for line in requires("libp2p") or []
        if name_of(line) != "fastecdsa" and "extra ==" not in line
    ]
    pip("--only-binary", "fastecdsa", READY_MADE, *others)
    pip("--no-deps", "--no-build-isolation", "--editable", ".")


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return found[0].lower() if found else ""


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--constraint", "constraints.txt", *words]
    done = subprocess.run(command, check=False)
    if done.returncode != 0:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
