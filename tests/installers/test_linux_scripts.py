"""The Linux install script and its undoing, carried out for real by an ordinary user."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kits.installers.packages import environment
from kits.installers.tree import (
    LINUX,
    PATH,
    PATIENCE_SECONDS,
    ROOT,
    Manager,
    Person,
    person,
    shop,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def for_sale() -> Iterator[Path]:
    with shop() as place:
        yield place


@pytest.fixture
def bob(for_sale: Path) -> Iterator[Person]:
    with person(for_sale) as someone:
        yield someone


def the_wheel(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_a_person_installs_uses_upgrades_and_removes_it_and_nothing_is_left(
    for_sale: Path, bob: Person
) -> None:
    wheel = the_wheel(for_sale)
    options = ("--python", bob.python)
    said = bob.does("sh", for_sale / "install.sh", "--from", wheel, *options)
    client = bob.home / ".local" / "bin" / "swarm-client"
    assert f"next: {client} join INVITE" in said
    assert bob.does(client, "version") == "0.1.0\n"
    # It is the installed one that runs, not this checkout.
    program = bob.home / ".local" / "share" / "swarmtrain-program"
    code = "import swarm_client; print(swarm_client.__file__)"
    assert str(program) in bob.does(program / "bin" / "python", "-P", "-c", code)
    folders = [Path(path) for path in json.loads(bob.does(client, "paths", "--json")).values()
               if isinstance(path, str)]  # fmt: skip
    assert bob.does(client, "credit") == "nothing yet\n"
    bob.does(client, "config", "set", "cpu_percent", "50")
    manager = Manager(bob.home / "scratch" / "manager")
    daemon = bob.starts(client, "daemon", more={"NOTIFY_SOCKET": str(manager.path)})
    try:
        manager.hears("READY=1")
        assert json.loads(bob.does(client, "status", "--json"))["pid"] == daemon.pid
        bob.does(client, "service", "install", "--no-start")
        assert json.loads(bob.does(client, "service", "status", "--json"))["enabled"]

        spoilt = bob.home / "scratch" / wheel.name
        spoilt.write_bytes(wheel.read_bytes()[:-1000])
        failed = bob.types("sh", for_sale / "install.sh", "--from", spoilt, *options)
        assert failed.returncode == 1
        assert "Nothing was changed" in failed.stderr
        spoilt.unlink()
        assert bob.does(client, "version") == "0.1.0\n"

        assert json.loads(bob.does(client, "status", "--json"))["pid"] == daemon.pid

        # An upgrade ends the client that runs in order, and starts the new program in its place.
        identity = (bob.home / ".local/share/swarmtrain/identity.key").read_bytes()
        would = bob.does("sh", LINUX / "install.sh", "--dry-run", *options)
        assert "would end the client that runs in order, and start it again" in would
        said = bob.does("sh", LINUX / "install.sh", *options)
        assert "the client runs again" in said
        manager.hears("STOPPING=1")
        assert daemon.wait(PATIENCE_SECONDS) == 0
        again = bob.types(client, "status", "--json")
        assert (again.returncode, again.stderr) == (0, "")
        assert json.loads(again.stdout)["pid"] != daemon.pid
        assert (bob.home / ".local/share/swarmtrain/identity.key").read_bytes() == identity
        assert bob.does(client, "config", "get", "cpu_percent") == "50\n"

        before = bob.files()
        would = bob.does("sh", for_sale / "install.sh", "--uninstall", "--dry-run", "--purge")
        assert "would end the client" in would
        assert bob.files() == before
        said = bob.does("sh", for_sale / "install.sh", "--uninstall")
        assert "stays; --purge removes it too" in said
    finally:
        daemon.kill()
        daemon.wait()
        manager.close()
    assert not program.exists()
    assert not client.is_symlink()
    assert not (bob.home / ".config" / "systemd").exists()
    assert (bob.home / ".local/share/swarmtrain/identity.key").read_bytes() == identity
    bob.does("sh", for_sale / "install.sh", "--uninstall", "--purge")
    assert bob.files() == []
    assert [path for path in folders if path.exists()] == []
    assert list((bob.home / "scratch").iterdir()) == []
    # Again: there is nothing, and that is fine.
    bob.does("sh", for_sale / "install.sh", "--uninstall", "--purge")


def test_uv_alone_installs_the_wheel_with_the_documented_override_and_not_without(
    for_sale: Path, tmp_path: Path
) -> None:
    override = "fastecdsa>=4,<5"
    assert f"OVERRIDE='{override}'" in (LINUX / "install.sh").read_text()
    assert f"echo '{override}' >overrides.txt" in (ROOT / "docs" / "installing.md").read_text()
    (tmp_path / "overrides.txt").write_text(override)

    def install(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [Path(sys.executable).with_name("uv"), "tool", "install", "--python", sys.executable,
             *options, the_wheel(for_sale)],
            env={"HOME": str(tmp_path), "PATH": PATH, **environment(for_sale / "packages")},
            cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
        )  # fmt: skip

    without = install()
    assert without.returncode != 0
    assert "fastecdsa==2.3.2" in without.stderr
    done = install("--overrides", "overrides.txt")
    assert done.returncode == 0, done.stderr
    client = tmp_path / ".local" / "bin" / "swarm-client"
    assert subprocess.run([client, "version"], capture_output=True, check=True).stdout == b"0.1.0\n"


# ---------------------------------------------------------------- before anything is made


def refused(
    bob: Person, *words: str | Path, more: Mapping[str, str] = {}
) -> subprocess.CompletedProcess[str]:
    """An error that has changed nothing and left nothing."""
    before = bob.files()
    done = bob.types("sh", *words, more=more)
    assert bob.files() == before
    assert list((bob.home / "scratch").iterdir()) == []
    return done


@pytest.mark.nightly
def test_a_wheel_with_another_hash_is_not_installed(for_sale: Path, bob: Person) -> None:
    wheel = the_wheel(for_sale)
    script = for_sale / "install.sh"
    sums = for_sale / "SHA256SUMS"
    options = ("--python", bob.python, "--from", wheel)
    try:
        sums.write_text(f"{'0' * 64}  {wheel.name}\n")
        done = refused(bob, script, *options)
        assert done.returncode == 1
        assert "Hash mismatch" in done.stderr
        assert "Nothing was changed" in done.stderr
    finally:
        sums.unlink()
    done = refused(bob, script, *options, "--sha256", "1" * 64)
    assert done.returncode == 1
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in done.stderr


@pytest.mark.nightly
def test_over_plain_http_nothing_that_is_not_hashed_is_installed(
    for_sale: Path, bob: Person, tmp_path: Path
) -> None:
    """The wheel is changed on the way, and constraints and hashes that fit it are added."""
    wheel = the_wheel(for_sale)
    shutil.copy(wheel, tmp_path)
    with zipfile.ZipFile(tmp_path / wheel.name, "a") as archive:
        archive.writestr("swarm_client/added.py", "")
    changed = (tmp_path / wheel.name).read_bytes()
    (tmp_path / "constraints.txt").write_text("numpy @ http://192.0.2.66/runs.tar.gz\n")
    (tmp_path / "SHA256SUMS").write_text(f"{hashlib.sha256(changed).hexdigest()}  {wheel.name}\n")
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            asked.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        done = refused(
            bob, for_sale / "install.sh", "--python", bob.python,
            "--from", f"http://127.0.0.1:{server.server_port}/{wheel.name}",
            "--sha256", hashlib.sha256(wheel.read_bytes()).hexdigest(),
        )  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 1
    assert "Hash mismatch" in done.stderr
    assert set(asked) == {f"/{wheel.name}"}


@pytest.mark.nightly
def test_without_uv_and_without_venv_it_says_what_to_install(for_sale: Path, bob: Person) -> None:
    tools = bob.home / "tools"
    bob.does("mkdir", tools)
    for name in ("sh", "uname", "dirname", "readlink", "id"):
        bob.does("ln", "-s", shutil.which(name) or name, tools)
    done = refused(bob, for_sale / "install.sh", "--from", the_wheel(for_sale),
                   more={"PATH": str(tools)})  # fmt: skip
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr


@pytest.mark.nightly
def test_half_a_download_of_the_script_does_nothing(bob: Person) -> None:
    lines = (LINUX / "install.sh").read_text().splitlines(keepends=True)
    assert lines[-1] == 'main "$@"\n'
    half = bob.home / "scratch" / "install.sh"
    for cut in range(20, len(lines), 25):
        half.write_text("".join(lines[:cut]))
        assert bob.types("sh", half, "--dry-run").stdout == ""
        assert bob.types("sh", half, "--uninstall", "--purge").stdout == ""
    half.unlink()
    assert bob.files() == []


@pytest.mark.nightly
def test_a_dry_run_says_what_would_be_done_and_does_nothing(for_sale: Path, bob: Person) -> None:
    done = refused(
        bob, for_sale / "install.sh", "--dry-run", "--from", the_wheel(for_sale),
        "--python", bob.python,
    )  # fmt: skip
    assert done.returncode == 0
    assert f"would link {bob.home}/.local/bin/swarm-client" in done.stdout


@pytest.mark.nightly
def test_wrong_words_and_missing_things_are_told_in_a_sentence(for_sale: Path, bob: Person) -> None:
    script = for_sale / "install.sh"
    wheel = the_wheel(for_sale)
    for words, code, told in (
        (("--nonsense",), 2, "there is no option --nonsense"),
        (("--from",), 2, "--from needs a value"),
        (("--purge",), 2, "--purge goes with --uninstall"),
        ((), 2, "say with --from which wheel"),
        (("--from", "/nowhere.whl"), 1, "there is no /nowhere.whl"),
        (("--from", bob.home), 1, "holds no pyproject.toml"),
        (("--from", script), 2, "neither a wheel"),
        (("--from", "http://example.org/x.whl"), 2, "needs --sha256"),
        (("--from", wheel, "--python", "/nowhere/python"), 1, "Nothing was changed"),
    ):
        done = refused(bob, script, *words)
        assert done.returncode == code, done
        assert told in done.stderr


@pytest.mark.nightly
def test_programs_of_somebody_else_are_not_replaced(for_sale: Path, bob: Person) -> None:
    folder = bob.home / ".local" / "bin"
    bob.does("mkdir", "-p", folder)
    bob.does("touch", folder / "swarm-client")
    done = refused(
        bob, for_sale / "install.sh", "--from", the_wheel(for_sale), "--python", bob.python
    )
    assert done.returncode == 1
    assert "is not from this script" in done.stderr


@pytest.mark.nightly
def test_a_folder_that_is_no_clients_home_is_not_purged(for_sale: Path, bob: Person) -> None:
    precious = bob.home / "precious"
    bob.does("mkdir", precious)
    bob.does("touch", precious / "thesis.txt")
    script = for_sale / "install.sh"
    done = refused(bob, script, "--uninstall", "--purge", "--home", precious)
    assert done.returncode == 1
    assert "is not the home of a client" in done.stderr
    bob.does("touch", bob.home / "identity.key")
    done = refused(bob, script, "--uninstall", "--purge", "--home", bob.home)
    assert done.returncode == 1
    assert "more than a client's home" in done.stderr


def test_the_scripts_pass_shellcheck() -> None:
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("no shellcheck here: sh tools/install_installer_tools.sh")
    scripts = [*(ROOT / "installers").rglob("*.sh"), *(ROOT / "tools").glob("*.sh"),
               *(LINUX / "deb" / name for name in ("postinst", "prerm", "postrm"))]  # fmt: skip
    scripts += [ROOT / ".ci" / name for name in ("run", "nightly", "steps.bash")]
    done = subprocess.run([program, "-x", *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
