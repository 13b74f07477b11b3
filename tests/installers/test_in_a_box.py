"""The .deb and both kinds of service, installed, used and removed under a real systemd."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.installers import packages as index
from kits.installers.box import Box, box
from kits.installers.tree import LINUX, PATIENCE_SECONDS, SUITABLE, shop

# Not in the group of the labs: a box has network namespaces of its own, and nothing sweeps it.
GROUP = pytest.mark.xdist_group("box")
pytestmark = [pytest.mark.lab, pytest.mark.nightly, pytest.mark.timeout(600), GROUP]

SYSTEM_PYTHON = "/usr/bin/python3"
UNIT = "swarm-client.service"
HOME = "/var/lib/swarmtrain"
TRAINING = """
import os, torch
from multiprocessing.shared_memory import SharedMemory
layer = torch.nn.Linear(64, 64)
layer(torch.ones(4, 64)).sum().backward()
assert layer.weight.grad is not None
memory = SharedMemory(create=True, size=1 << 20)
memory.close()
memory.unlink()
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.setpriority(os.PRIO_PROCESS, 0, 15)
open("/tmp/by-swarmtrain", "w").close()
os.listdir("/proc/1")
for forbidden in ("/usr/by-swarmtrain", "/etc/by-swarmtrain"):
    try:
        open(forbidden, "w")
    except OSError:
        continue
    raise AssertionError(forbidden)
try:
    assert os.listdir("/home") == []
except PermissionError:
    pass
"""
"""What the program does of such things, inside the unit's confinement."""


@pytest.fixture(scope="module")
def for_sale() -> Iterator[Path]:
    done = subprocess.run([SYSTEM_PYTHON, "-c", SUITABLE], check=False, capture_output=True)
    if done.returncode != 0:
        pytest.skip(
            f"{SYSTEM_PYTHON} cannot use the packages of the Python that runs the tests "
            f"({sys.version_info[0]}.{sys.version_info[1]})"
        )
    with shop() as place:
        yield place


@pytest.fixture
def machine(for_sale: Path) -> Iterator[Box]:
    with box() as made:
        yield made


@pytest.fixture(scope="module")
def packages(for_sale: Path) -> Iterator[list[Path]]:
    """The package, and two upgrades of it, which differ in their version alone."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("no dpkg-deb here; Debian and its kin have it")
    with tempfile.TemporaryDirectory(prefix="swarmtrain-deb-test-") as folder:
        place = Path(folder)
        (wheel,) = for_sale.glob("*.whl")
        subprocess.run(
            ["sh", LINUX / "build_deb.sh", "--out", place, "--from", wheel],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": folder,
                 **index.environment(for_sale / "packages")},
            check=True, timeout=PATIENCE_SECONDS, capture_output=True,
        )  # fmt: skip
        (first,) = place.glob("*.deb")
        assert first.name.startswith("swarmtrain_0.1.0-1_")
        made = [first]
        subprocess.run(["dpkg-deb", "-R", first, place / "tree"], check=True)
        control = place / "tree" / "DEBIAN" / "control"
        for revision in ("2", "3"):
            text = control.read_text().splitlines()
            lines = [f"Version: 0.1.0-{revision}" if line.startswith("Version:") else line
                     for line in text]  # fmt: skip
            control.write_text("\n".join(lines) + "\n")
            made.append(place / f"{revision}.deb")
            subprocess.run(
                ["dpkg-deb", "--root-owner-group", "-Znone", "--build", place / "tree", made[-1]],
                check=True, capture_output=True,
            )  # fmt: skip
        place.chmod(0o755)
        yield made


def everything(machine: Box) -> set[str]:
    """What a package could leave behind; not the books that dpkg, useradd and systemd keep."""
    folders = ("/etc", "/usr/bin", "/usr/lib/systemd", "/usr/lib/swarmtrain", "/usr/share/doc",
               "/var/lib", "/opt", "/home")  # fmt: skip
    there = [folder for folder in folders if machine.has(folder)]
    found = machine.does("find", *there, "-xdev").splitlines()
    # In /tmp other programs of this machine come and go: what they do below shows through.
    found += machine.does("find", "/tmp", "-maxdepth", "1", "-name", "swarmtrain-install*").split()
    accounts = ("passwd-", "shadow-", "group-", "gshadow-", ".pwd.lock", "subuid", "subgid")
    books = ("/var/lib/dpkg/", "/var/lib/systemd/catalog", *(f"/etc/{name}" for name in accounts))
    return {path for path in found if "swarm" in path or not path.startswith(books)}


def shown(machine: Box, name: str) -> str:
    return machine.does("systemctl", "show", UNIT, "--value", f"--property={name}").strip()


def test_the_package_is_installed_used_upgraded_removed_and_purged(
    machine: Box, packages: list[Path]
) -> None:
    before = everything(machine)
    machine.does("dpkg", "-i", packages[0])
    # Started means: it has said READY=1, or systemd would wait still.
    assert shown(machine, "ActiveState") == "active"
    assert machine.does("systemctl", "is-enabled", UNIT) == "enabled\n"
    names = ("Type", "KillMode", "Nice", "IOSchedulingClass", "TimeoutStopUSec", "User")
    told = {name: shown(machine, name) for name in names}
    assert told == {
        "Type": "notify", "KillMode": "mixed", "Nice": "10", "IOSchedulingClass": "3",
        "TimeoutStopUSec": "1min", "User": "swarmtrain",
    }  # fmt: skip
    # A list of devices, even one that another option brings along, hides every GPU.
    assert (shown(machine, "DevicePolicy"), shown(machine, "DeviceAllow")) == ("auto", "")
    status = json.loads(client(machine, "status", "--json"))
    assert status["pid"] > 0
    identity = machine.does("cat", f"{HOME}/identity.key")
    client(machine, "pause")
    assert shown(machine, "StatusText").startswith("paused")

    first = shown(machine, "MainPID")
    machine.does("dpkg", "-i", packages[1])
    assert shown(machine, "ActiveState") == "active"
    assert shown(machine, "MainPID") != first
    assert machine.does("cat", f"{HOME}/identity.key") == identity

    machine.does("systemctl", "disable", "--now", UNIT)
    machine.does("dpkg", "-i", packages[2])
    assert shown(machine, "ActiveState") == "inactive"
    assert machine.types("systemctl", "is-enabled", UNIT).stdout == "disabled\n"

    machine.does("systemctl", "enable", "--now", UNIT)
    machine.does("dpkg", "-r", "swarmtrain")
    assert not machine.has("/usr/lib/swarmtrain")
    assert shown(machine, "ActiveState") == "inactive"
    assert machine.does("cat", f"{HOME}/identity.key") == identity
    machine.does("dpkg", "-P", "swarmtrain")
    assert everything(machine) - before == set()
    assert machine.types("id", "swarmtrain").returncode != 0


def test_torch_trains_and_nothing_else_can_be_written_inside_the_units_confinement(
    machine: Box, packages: list[Path]
) -> None:
    machine.does("dpkg", "-i", packages[0])
    machine.does("mkdir", "-p", "/home/somebody")
    machine.does("sh", "-c", 'printf %s "$1" >/opt/training.py', "sh", TRAINING)
    drop_in = "[Service]\\nExecStartPre=/usr/lib/swarmtrain/bin/python /opt/training.py\\n"
    folder = f"/etc/systemd/system/{UNIT}.d"
    machine.does("sh", "-c", f"mkdir {folder} && printf '{drop_in}' >{folder}/training.conf")
    machine.does("systemctl", "daemon-reload")
    done = machine.types("systemctl", "restart", UNIT)
    assert done.returncode == 0, machine.types("journalctl", "-u", UNIT, "--no-pager").stdout
    assert shown(machine, "ActiveState") == "active"


def client(machine: Box, *words: str) -> str:
    return machine.does("swarm-client", *words, "--home", HOME, user="swarmtrain")


def test_services_of_the_machine_and_of_one_user_come_and_go(machine: Box, for_sale: Path) -> None:
    (wheel,) = for_sale.glob("*.whl")
    machine.does("useradd", "--create-home", "bob")
    number = machine.does("id", "-u", "bob").strip()
    before = everything(machine)
    options = ("--python", SYSTEM_PYTHON, "--prefix", "/opt/swarmtrain")
    machine.does("sh", for_sale / "install.sh", "--from", wheel, *options,
                 more=index.environment(for_sale / "packages"))  # fmt: skip
    program = "/opt/swarmtrain/bin/swarm-client"

    would = machine.does(program, "service", "install", "--system", "--dry-run")
    assert "would run useradd" in would
    made = everything(machine) - before
    assert {path for path in made if not path.startswith("/opt/swarmtrain")} == set()
    machine.does(program, "service", "install", "--system")
    assert shown(machine, "ActiveState") == "active"
    status = json.loads(machine.does(program, "service", "status", "--system", "--json"))
    assert (status["installed"], status["enabled"], status["state"]) == (True, True, "active")
    machine.does(program, "service", "uninstall", "--system", "--purge")
    assert shown(machine, "LoadState") == "not-found"

    machine.does("systemctl", "start", f"user@{number}.service")
    session = {"HOME": "/home/bob", "XDG_RUNTIME_DIR": f"/run/user/{number}"}

    def bob(*words: str | Path) -> str:
        return machine.does(*words, user="bob", more=session)

    bob(program, "service", "install")
    bob(program, "service", "install")  # again: taken up anew
    assert bob("systemctl", "--user", "is-active", UNIT) == "active\n"
    bob(program, "pause")
    told = json.loads(bob(program, "service", "status", "--json"))
    assert (told["installed"], told["enabled"], told["state"]) == (True, True, "active")
    assert told["text"].startswith("paused")
    bob(program, "service", "uninstall")
    assert bob("systemctl", "--user", "show", UNIT, "--value", "-p", "LoadState") == "not-found\n"
    bob(program, "service", "install")
    bob(
        "sh",
        for_sale / "install.sh",
        "--uninstall",
        "--purge",
        "--prefix",
        "/opt/swarmtrain-not-bobs",
    )
    machine.does(
        "sh", for_sale / "install.sh", "--uninstall", "--purge", "--prefix", "/opt/swarmtrain"
    )
    left = everything(machine) - before
    assert {path for path in left if machine.types("test", "-d", path).returncode != 0} == set()
