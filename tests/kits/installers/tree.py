"""What the installers' tests share: a wheel of this tree, and a person with a home of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kits.installers import packages
from kits.installers.packages import PACKAGES
from kits.other_user import OTHER_USER_ID

ROOT = Path(__file__).parents[3]
LINUX = ROOT / "installers" / "linux"
PATIENCE_SECONDS = 250.0
"""An installation takes twenty on a machine that does nothing else."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

SUITABLE = f"""
import sys, ensurepip, venv
sys.path.append({str(PACKAGES)!r})
import click, torch
assert sys.version_info[:2] == {tuple(sys.version_info[:2])!r}
open({str(ROOT / "pyproject.toml")!r}).close()
"""


class Manager:
    """The end of systemd's notification socket that a service manager holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(PATIENCE_SECONDS)
        self._socket.bind(str(path))
        path.chmod(0o777)

    def next(self) -> list[str]:
        """The lines of one notification."""
        return self._socket.recv(65_536).decode().splitlines()

    def hears(self, line: str) -> None:
        while line not in self.next():
            pass

    def close(self) -> None:
        self._socket.close()
        self.path.unlink()


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody who has just been given a machine: an empty home, and nothing in the environment."""

    home: Path
    python: str
    user: int | None
    """None: whoever runs the tests."""
    packages: Path
    """All that pip and uv can install."""

    def environment(self, more: Mapping[str, str] = {}) -> dict[str, str]:
        scratch = self.home / "scratch"
        return {
            "HOME": str(self.home), "PATH": PATH, "TMPDIR": str(scratch),
            "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8", **packages.environment(self.packages),
            **more,
        }  # fmt: skip

    def types(
        self, *words: str | Path, more: Mapping[str, str] = {}
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in words], cwd=self.home, env=self.environment(more),
            user=self.user, group=self.user, extra_groups=None if self.user is None else [],
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=PATIENCE_SECONDS, check=False,
        )  # fmt: skip

    def does(self, *words: str | Path, more: Mapping[str, str] = {}) -> str:
        done = self.types(*words, more=more)
        assert done.returncode == 0, done
        return done.stdout

    def starts(self, *words: str | Path, more: Mapping[str, str] = {}) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [str(word) for word in words], cwd=self.home, env=self.environment(more),
            user=self.user, group=self.user, extra_groups=None if self.user is None else [],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def files(self) -> list[str]:
        """Everything below the home that is not a folder."""
        found = (path for path in self.home.rglob("*") if path.is_symlink() or not path.is_dir())
        return sorted(str(path.relative_to(self.home)) for path in found)


@contextmanager
def person(place: Path) -> Iterator[Person]:
    """An ordinary user, wherever one can reach an interpreter and this checkout, at a `shop`."""
    # Not in pytest's own folder, which is closed to other users.
    with tempfile.TemporaryDirectory(prefix="swarmtrain person ") as folder:
        home = Path(folder)
        (home / "scratch").mkdir()
        for user in ([OTHER_USER_ID] if os.geteuid() == 0 else []) + [None]:
            if user is not None:
                for path in (home, home / "scratch"):
                    os.chown(path, user, user)
            for python in (sys.executable, "/usr/bin/python3"):
                someone = Person(home, python, user, place / "packages")
                try:
                    fits = someone.types(python, "-c", SUITABLE).returncode == 0
                except OSError:
                    continue
                if fits:
                    yield someone
                    return
        raise AssertionError(f"{sys.executable} itself cannot make virtual environments")


def make_wheel(folder: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--disable-pip-version-check", "--wheel-dir", folder, ROOT],
        check=True, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    return wheel


@contextmanager
def shop() -> Iterator[Path]:
    """A folder that everybody can read: the wheel, the script beside it, and what it needs."""
    with tempfile.TemporaryDirectory(prefix="swarmtrain-shop-") as folder:
        place = Path(folder)
        packages.fill(place / "packages", make_wheel(place))
        shutil.copy(LINUX / "install.sh", place)
        place.chmod(0o755)
        for path in place.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield place
